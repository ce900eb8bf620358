"""Activations that are computed again: fewer bytes saved, the same gradients, one gather each."""

from __future__ import annotations

import weakref
from collections import Counter
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.schedule.events import Op
from tests.nets import (
    Batch,
    Block,
    Mlp,
    decoder,
    decoder_batch,
    encoder_decoder,
    encoder_decoder_batch,
    loss,
    mostly_frozen,
    mostly_frozen_batch,
    numbers,
)
from tests.ranks import run_sharing, run_threads
from tests.steps import (
    STRATEGIES,
    assert_at_rest,
    assert_gradients,
    averaged,
    play,
    train,
    units_of,
)
from tests.written import storage

BATCHES = [decoder_batch(rank, 2) for rank in range(2)]


# ---- shard(activation_checkpointing=True) ------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_those_of_a_plain_model_bit_for_bit(strategy: str, world: int) -> None:
    taken = play(
        decoder(), [train] * 3, BATCHES[:world], strategy=strategy, activation_checkpointing=True
    )
    assert all(step.follows for step in taken)


def saved_bytes(model: nn.Module, batch: Batch) -> int:
    """Bytes that autograd keeps of a forward pass, without what the model holds anyway."""
    ours = {storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    by_storage: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        by_storage.setdefault(storage(tensor), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model, batch)
    return sum(t.untyped_storage().nbytes() for key, t in by_storage.items() if key not in ours)


def test_a_checkpointed_model_saves_a_fraction_of_the_bytes() -> None:
    batch = decoder_batch(0, 8)
    plain, checkpointed = decoder(), decoder()
    sw.shard(plain, comm=LocalComm())
    sw.shard(checkpointed, comm=LocalComm(), activation_checkpointing=True)
    assert saved_bytes(checkpointed, batch) < 0.25 * saved_bytes(plain, batch)


def test_recomputing_gathers_nothing_more() -> None:
    """Wrapped around units, as elsewhere, each would be gathered once more."""
    gathers = []
    for recomputes in (False, True):
        taken = play(decoder(), [train] * 2, BATCHES, activation_checkpointing=recomputes)
        gathers.append(units_of(taken[1].done, Op.GATHER))
    assert gathers[0] == gathers[1]


def test_recomputing_only_reads_parameters() -> None:
    """torch detaches what it recomputes with; to keep what is written costs a copy and fences."""

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, comm=comm, activation_checkpointing=True)
        written = list[bool]()
        sharded.runtime.listeners.append(
            lambda _: written.extend(bucket.is_written() for bucket in sharded.buckets)
        )
        train(model, BATCHES[comm.rank])
        assert written
        assert not any(written)

    models = [decoder() for _ in range(2)]
    run_sharing(2, rank)


def test_repeated_units_are_checkpointed_and_the_others_are_not() -> None:
    model = decoder()
    sharded = sw.shard(model, comm=LocalComm(), activation_checkpointing=True)
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == ["blocks.0", "blocks.1", "blocks.2"]
    sharded.unshard()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (sw.ActivationCheckpointing(every=2), [1]),
        (sw.ActivationCheckpointing(every=3), [2]),
        (sw.ActivationCheckpointing("Block"), [0, 1, 2]),
        (sw.ActivationCheckpointing([Block]), [0, 1, 2]),
        (sw.ActivationCheckpointing("blocks.[12]"), [1, 2]),
        (sw.ActivationCheckpointing(("blocks.0", "blocks.2"), every=2), [2]),
    ],
)
def test_a_policy_chooses_units_by_class_by_name_and_every_nth(
    policy: sw.ActivationCheckpointing, chosen: list[int]
) -> None:
    model = decoder()
    sw.shard(model, comm=LocalComm(), activation_checkpointing=policy)
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == [f"blocks.{index}" for index in chosen]


def test_each_unit_less_that_is_recomputed_keeps_more_bytes() -> None:
    batch, nbytes = decoder_batch(0, 8), []
    for every in (1, 2, 3):
        model, policy = decoder(), sw.ActivationCheckpointing(every=every)
        sw.shard(model, comm=LocalComm(), activation_checkpointing=policy)
        nbytes.append(saved_bytes(model, batch))
    assert nbytes == sorted(nbytes)
    assert nbytes[0] < 0.5 * nbytes[1]


@pytest.mark.parametrize("pattern", ["Blok", "block.0", "(root)"])
def test_a_pattern_of_no_unit_is_refused_nearest_first(pattern: str) -> None:
    policy = sw.ActivationCheckpointing(pattern)
    with pytest.raises(sw.ConfigError) as error:
        sw.shard(decoder(), comm=LocalComm(), activation_checkpointing=policy)
    assert f"{pattern!r}, which is neither the class nor the name of a unit" in str(error.value)
    assert "Nearest first: " in str(error.value)
    assert "Block" in str(error.value)


def test_every_counts_from_one() -> None:
    with pytest.raises(sw.ConfigError, match="every is 0, so no unit would be recomputed"):
        sw.ActivationCheckpointing(every=0)


# ---- on the host -------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two units inside, of which one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.used, self.unused = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(torch.tanh(self.own(x)))
        return out


def test_inputs_on_the_host_gather_no_unit_inside_that_is_not_called() -> None:
    policy = sw.ActivationCheckpointing("Branches", offload=True)
    wrap = sw.wrap.by_hand("0", "0.used", "0.unused")

    def rank(comm: Comm) -> tuple[list[str], set[str]]:
        model = nn.Sequential(Branches())
        sharded = sw.shard(model, wrap=wrap, comm=comm, activation_checkpointing=policy)
        for _ in range(2):  # the first gathers what may be used
            with sw.record(sharded) as recording:
                model(torch.ones(2, 4)).sum().backward()
        return units_of(recording.events, Op.GATHER), sharded.runtime.facts.pinned

    for gathered, pinned in run_threads(2, rank):
        assert "0.unused" not in gathered
        assert not pinned


@pytest.mark.parametrize("offload", [False, True])
def test_inputs_on_the_host_free_those_of_the_device(offload: bool) -> None:
    """On CPU the host's copies are a second pool; parameters are never copied into it."""
    model = decoder()
    policy = sw.ActivationCheckpointing(offload=offload)
    sw.shard(model, comm=LocalComm(), activation_checkpointing=policy)
    inputs, copied = list[weakref.ref[Any]](), list[torch.Size]()
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[0].numel():
                copied.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    batch = decoder_batch(0, 8)
    with Copies():  # type: ignore[no-untyped-call]
        value = loss(model, batch)
    assert [x() is None for x in inputs] == [offload] * 3
    assert copied == ([torch.Size((8, batch[0].shape[1], 16))] * 3 if offload else [])
    value.backward()


def test_a_copy_of_a_checkpointed_model_is_plain() -> None:
    model = decoder()
    sw.shard(model, comm=LocalComm(), activation_checkpointing=True)
    copied = deepcopy(model)
    assert not [name for name, module in copied.named_modules() if "forward" in vars(module)]
    assert torch.equal(loss(copied, BATCHES[0]), loss(model, BATCHES[0]))


# ---- frozen inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_rank_updates_on_a_frozen_model_have_gradients(strategy: str) -> None:
    """The embedding is frozen, so no input of a block requires a gradient."""
    batches = [mostly_frozen_batch(rank, 2) for rank in range(2)]
    model = mostly_frozen()
    truth = averaged(model, train, batches)
    low_rank = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(low_rank) == 12
    assert all(truth[name] is not None for name in low_rank)
    play(model, [train] * 2, batches, strategy=strategy, activation_checkpointing=True)


def test_reentrant_checkpoints_would_lose_the_gradients_of_the_first_block() -> None:
    """Why the other kind is picked: this one runs its function without autograd's knowledge."""
    model, batch = mostly_frozen(), mostly_frozen_batch(0, 2)
    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        value = loss(model, batch)
    assert not value.requires_grad


# ---- both at once --------------------------------------------------------------------------------


class OwnCheckpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def test_a_model_that_checkpoints_by_itself_is_refused_with_the_reason_and_what_to_do() -> None:
    with pytest.raises(sw.ConfigError) as error:
        sw.shard(OwnCheckpoints(), comm=LocalComm(), activation_checkpointing=True)
    message = str(error.value)
    assert "OwnCheckpoints has its own gradient checkpointing on" in message
    assert "recomputed twice, and gathered once more" in message
    assert "model.activation_checkpointing_disable()" in message


def test_so_is_one_whose_modules_torch_has_wrapped() -> None:
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model: Any = decoder()
    model.blocks[0] = wrappers.checkpoint_wrapper(model.blocks[0])
    with pytest.raises(sw.ConfigError, match="CheckpointWrapper has its own gradient checkpoint"):
        sw.shard(model, comm=LocalComm(), activation_checkpointing=True)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_step(model: nn.Module, batch: Batch) -> None:
    model(input_ids=batch[0], labels=batch[0]).loss.backward()


@pytest.mark.prove
def test_a_transformers_model_is_refused_while_its_own_checkpointing_is_on() -> None:
    model: Any = tiny_llama()
    model.activation_checkpointing_enable()
    with pytest.raises(sw.ConfigError, match=r"Llama\w+ has its own gradient checkpointing on"):
        sw.shard(model, comm=LocalComm(), activation_checkpointing=True)
    model.activation_checkpointing_disable()
    sw.shard(model, comm=LocalComm(), activation_checkpointing=True)


@pytest.mark.parametrize("by_transformers", [False, True])
def test_a_transformers_model_trains_alike_with_our_checkpointing_and_with_its_own(
    by_transformers: bool,
) -> None:
    torch.manual_seed(0)
    model: Any = tiny_llama().train()
    truth = averaged(model, llama_step, BATCHES)
    if by_transformers:
        model.activation_checkpointing_enable()
    models = [model, deepcopy(model)]

    def rank(comm: Comm) -> None:
        mine = models[comm.rank]
        sharded = sw.shard(mine, comm=comm, activation_checkpointing=not by_transformers)
        for _ in range(2):
            llama_step(mine, BATCHES[comm.rank])
            assert_gradients(mine, truth)
            assert_at_rest(sharded)
            mine.zero_grad()

    run_threads(2, rank)


# ---- checkpoints of the user's own, wherever they are --------------------------------------------


class Checkpointed(nn.Module):
    """A stem, four layers with checkpoints ``where``, and a head."""

    def __init__(self, where: str, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Mlp(8, 11) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.where = where
        self.again = partial(checkpoint, use_reentrant=reentrant)
        if where == "inside units":
            for layer in self.layers:
                inner = layer.forward
                layer.forward = partial(self.again, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.where == "over several units":
            x = self.again(self.pair, 0, x)
            x = self.again(self.pair, 2, x)
        elif self.where == "over all units":
            x = self.again(self.all, x)
        elif self.where == "one in another":
            x = self.again(self.nested, x)
        elif self.where == "twice around one unit":
            for _ in range(2):
                x = self.again(self.layers[1], x)
        else:
            for layer in self.layers:
                x = self.again(layer, x) if self.where == "around units" else layer(x)
        out: Tensor = self.head(x)
        return out

    def pair(self, first: int, x: Tensor) -> Tensor:
        out: Tensor = self.layers[first + 1](self.layers[first](x))
        return out

    def all(self, x: Tensor) -> Tensor:
        return self.pair(2, self.pair(0, x))

    def nested(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.again(layer, x)
        return x


# As torch says of a reentrant checkpoint inside another, which runs without gradients at first.
quiet = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WHERE = (
    "around units",
    "inside units",
    "over several units",
    "over all units",
    "one in another",
    "twice around one unit",
)


@quiet
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_both_kinds_of_checkpoint_work_wherever_they_are(
    where: str, reentrant: bool, strategy: str
) -> None:
    batches = [(numbers(rank, (3, 6)), numbers(rank + 9, (3, 2))) for rank in range(2)]
    model = Checkpointed(where, reentrant=reentrant)
    taken = play(model, [train] * 3, batches, strategy=strategy)
    assert not taken[2].on_demand
    listed, done = (
        Counter(units_of(events, Op.GATHER)) for events in (taken[2].listed, taken[2].done)
    )
    assert done == listed  # some earlier than listed, where several units are computed again


def test_tied_and_encoder_decoder_models_may_be_checkpointed() -> None:
    batches = [encoder_decoder_batch(rank, 2) for rank in range(2)]
    taken = play(encoder_decoder(), [train] * 2, batches, activation_checkpointing=True)
    assert taken[1].follows


def test_a_unit_by_class_is_checkpointed_like_one_that_was_found() -> None:
    options = {"wrap": sw.wrap.by_class(Block), "activation_checkpointing": True}
    taken = play(decoder(), [train] * 2, BATCHES, **options)
    assert taken[1].follows
