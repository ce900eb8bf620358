"""A model's state dict: its kinds, equal to a plain model's, and back again."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import StateDictType

import shardwise as sw
from shardwise.checkpoint import state_dict
from shardwise.checkpoint.options import KINDS, kind_of
from shardwise.checkpoint.state_dict import StateDict
from shardwise.comm.protocol import Comm
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.whole import gather_whole
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.nets import NETS, Net
from tests.steps import STRATEGIES


@pytest.mark.parametrize("kind", KINDS)
def test_fsdps_words_mean_the_same(kind: str) -> None:
    words = (kind, kind.upper(), f"{kind.upper()}_STATE_DICT")
    enumerated = StateDictType[f"{kind.upper()}_STATE_DICT"]
    assert {kind_of(word) for word in (*words, enumerated)} == {kind}
    assert getattr(StateDict, kind.upper()) == StateDict(kind)


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        (fsdp.FullStateDictConfig(), StateDict("full", offload_to_cpu=False)),
        (fsdp.FullStateDictConfig(offload_to_cpu=True), StateDict("full")),
        (fsdp.FullOptimStateDictConfig(rank0_only=True), StateDict("full", rank0_only=True)),
        (fsdp.ShardedStateDictConfig(offload_to_cpu=True), StateDict("sharded")),
        (fsdp.LocalStateDictConfig(), StateDict("local", offload_to_cpu=False)),
    ],
)
def test_fsdps_configurations_are_policies(torchs: Any, ours: StateDict) -> None:
    beside = {"offload_to_cpu": True, "rank0_only": False, "names": None}
    assert StateDict.of({"kind": torchs, **beside}) == ours


def test_state_of_fsdps_configuration_is_that_of_its_kind() -> None:
    sharded = sw.shard(torch.nn.Linear(2, 2))
    kind: Any = fsdp.FullStateDictConfig(offload_to_cpu=True)
    assert equal(sharded.state_dict(kind), sharded.state_dict("full"))
    with pytest.raises(sw.ConfigError, match="which has these options"):
        sharded.state_dict(kind, rank0_only=True)


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        ("ful", {}, "nearest is 'full'"),
        (StateDictOptions(), {}, "Write 'sharded', offload_to_cpu=False in its place"),
        (
            StateDictOptions(full_state_dict=True, cpu_offload=True),
            {},
            "Write 'full', offload_to_cpu=True, rank0_only=True in its place",
        ),
        ("full", {"rank_0_only": True}, "nearest is 'rank0_only'"),
        ("local", {"rank0_only": True}, "every rank has shards of its own"),
        (StateDict.FULL, {"rank0_only": True}, "which has these options"),
    ],
)
def test_what_means_nothing_is_an_error(kind: Any, how: dict[str, Any], message: str) -> None:
    sharded = sw.shard(torch.nn.Linear(2, 2))
    with pytest.raises(sw.ConfigError, match=message):
        sharded.state_dict(kind, **how)


DECODER, TIED, CONVNET = NETS[0], NETS[1], next(n for n in NETS if "convnet" in str(n))


def states_of(
    net: Net, world: int, kind: Any = "full", strategy: str = "full_shard", **how: Any
) -> Any:
    """Every rank's state dict."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        return sw.shard(model, strategy, comm=comm).state_dict(kind, **how)

    return on_ranks(world, net.build, rank)


@pytest.mark.parametrize("net", NETS, ids=str)
def test_full_is_what_a_plain_model_says(net: Net) -> None:
    plain = seeded(net.build).state_dict()
    assert all(equal(state, plain) for state in states_of(net, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_rank_0_only_the_others_get_nothing(strategy: str) -> None:
    first, *others = states_of(TIED, 2, strategy=strategy, rank0_only=True)
    assert equal(first, seeded(TIED.build).state_dict())
    assert others == [{}]


def test_whole_tensors_have_memory_of_their_own() -> None:
    # A view would make torch.save write the whole bucket for each of them.
    state = states_of(DECODER, 2)[0]
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in state.values())


def test_full_copies_on_one_host_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        states_of(DECODER, 2, rank0_only=True)
        assert "full copies" not in caplog.text
        state = states_of(DECODER, 3)[0]
    nbytes = sum(value.nbytes for value in state.values())
    assert f"3 full copies of {nbytes / 1024:.1f} KiB in host memory" in caplog.text
    assert f"{3 * nbytes / 1024:.1f} KiB in all" in caplog.text


def test_one_rank_has_one_copy_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    states_of(DECODER, 1)
    assert "full copies" not in caplog.text


def test_who_leaves_it_to_rank_0_never_holds_more_than_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []
    references: dict[Comm, list[Any]] = defaultdict(list)

    def watched(bucket: Bucket) -> list[Tensor]:
        values, comm = gather_whole(bucket), bucket.mesh.shard
        storage = values[0].untyped_storage()
        references[comm].append(torch.multiprocessing.reductions.StorageWeakRef(storage))
        if comm.rank:
            alive.append(sum(not ref.expired() for ref in references[comm]))
        return values

    monkeypatch.setattr(state_dict, "gather_whole", watched)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        assert len(sharded.buckets) > 3
        sharded.state_dict(rank0_only=True)

    on_ranks(2, DECODER.build, rank)
    assert set(alive) == {1}


def test_only_the_buckets_of_chosen_names_are_gathered() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        state = sharded.state_dict(names=lambda name: name.startswith("blocks.1."), rank0_only=True)
        block = next(b for b in sharded.buckets if b.unit == "blocks.1")
        assert sum(comm.counters.calls.values()) == 1
        assert sum(comm.counters.bytes_sent.values()) == block.shard.nbytes
        return list(state)

    names = on_ranks(2, DECODER.build, rank)[0]
    assert names == [n for n in seeded(DECODER.build).state_dict() if n.startswith("blocks.1.")]


@pytest.mark.parametrize("net", NETS, ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_every_shard_of_sharded_knows_its_whole(net: Net, strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        state = sw.shard(model, strategy, comm=comm).state_dict("SHARDED_STATE_DICT")
        parts = {n: v.to_local() for n, v in state.items() if isinstance(v, ShardTensor)}
        assert bool(parts) == (strategy == "full_shard")
        return {n: v.full_tensor() if n in parts else v for n, v in state.items()}

    assert equal(on_ranks(3, net.build, rank)[0], seeded(net.build).state_dict())


def test_local_is_what_this_rank_has_at_rest() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        state, shards = sharded.state_dict(sw.StateDict.LOCAL), sharded.local_state_dict()
        buffers = dict(model.named_buffers())
        for name, value in state.items():
            assert torch.equal(value, shards[name] if name in shards else buffers[name])
        model.load_state_dict(state)  # this rank's own shards fit

    on_ranks(3, CONVNET.build, rank)


@pytest.mark.parametrize("net", NETS, ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_rank_0_gives_all_ranks_their_parts(net: Net, strategy: str) -> None:
    whole = seeded(net.build, seed=1).state_dict()

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        sharded.load_state_dict(whole if comm.rank == 0 else {})
        return clones(model.state_dict())

    assert all(equal(state, whole) for state in on_ranks(3, net.build, rank))


def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing() -> None:
    state = seeded(DECODER.build, seed=1).state_dict()
    state["embed.weight"] = torch.zeros(3, 3)
    state["extra"] = state.pop("norm.bias")
    before = seeded(DECODER.build).state_dict()

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        text = error_text(sw.CheckpointError, lambda: sharded.load_state_dict(state))
        assert equal(model.state_dict(), before)
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert texts[0] == texts[1]
    for part in ("in 3 points", "norm.bias: not stored", "extra: stored", "stored as (3, 3)"):
        assert part in texts[0]


@pytest.mark.parametrize("by_model", [False, True], ids=["handle", "model"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard"])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_what_sharded_gave_loads_back_in_any_layout(
    net: Net, strategy: str, by_model: bool
) -> None:
    """Each rank gives its shards, of a model that was cut in another way."""
    models = [seeded(net.build, seed=1) for _ in range(3)]
    whole = clones(models[0].state_dict())

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        shards = sw.shard(models[comm.rank], strategy, comm=comm).state_dict("sharded")
        sharded = sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        model.load_state_dict(shards) if by_model else sharded.load_state_dict(shards)
        return clones(model.state_dict())

    assert all(equal(state, whole) for state in on_ranks(3, net.build, rank))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


class Elsewhere(Tensor):
    """A tensor as DTensor and FakeTensor are: one whose memory is not its values."""


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "rank 0's state dict is a NoneType"),
        ([1], "rank 0's state dict is a list"),
        ({0: torch.zeros(3)}, "has the key 0"),
        (
            {**small().state_dict(), "0.bias": torch.zeros(3).as_subclass(Elsewhere)},
            "is a Elsewhere, .* full_tensor()",
        ),
    ],
    ids=["none", "list", "number as a name", "subclass"],
)
def test_what_is_no_state_dict_is_refused_on_every_rank(state: Any, says: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        mine = state if comm.rank == 0 else {}
        return error_text(sw.CheckpointError, lambda: sharded.load_state_dict(mine))

    for text in on_ranks(2, small, rank):
        assert re.search(says, text)


def test_views_of_other_tensors_are_sent_by_their_values() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        column = torch.arange(6.0).view(2, 3)[1:, 2]  # one element, and the stride of the rows
        conjugate = torch.tensor([[1.0 + 2.0j]]).conj()
        sharded.load_state_dict({"weight": conjugate, "bias": column})
        return sharded.state_dict()

    def build() -> nn.Module:
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.complex64))
        return model

    for states in on_ranks(2, build, rank):
        assert (states["weight"].item(), states["bias"].item()) == (1.0 - 2.0j, 5.0)


def test_what_other_ranks_pass_is_not_looked_at() -> None:
    whole = seeded(small, seed=1).state_dict()

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        nothing: Any = None
        sw.shard(model, comm=comm).load_state_dict(whole if comm.rank == 0 else nothing)
        return clones(model.state_dict())

    assert all(equal(state, whole) for state in on_ranks(2, small, rank))


@pytest.mark.parametrize(
    "how",
    [
        lambda rank: {"kind": ("full", "local")[rank]},
        lambda rank: {"rank0_only": rank == 0},
        lambda rank: {"names": lambda name: name.startswith(f"blocks.{rank}.")},
    ],
    ids=["kind", "rank0_only", "names"],
)
def test_ranks_that_ask_for_different_things_are_told(how: Callable[[int], Any]) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.RanksDisagree, lambda: sharded.state_dict(**how(comm.rank)))

    on_ranks(2, DECODER.build, rank)


def test_another_dtype_is_refused_with_how_to_convert() -> None:
    narrow = {name: value.bfloat16() for name, value in seeded(small).state_dict().items()}

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.load_state_dict(narrow))

    text = on_ranks(1, small, rank)[0]
    assert "0.weight: stored as BF16, the model has F32" in text
    assert "states[NAME] = states[NAME].to(dtype)" in text


class Counting(nn.Linear):
    """A module with state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None: ...


def test_extra_state_of_modules_is_warned_of_and_let_pass(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        state = clones(sharded.state_dict())
        sharded.load_state_dict({**state, "0._extra_state": {"calls": 3}})  # type: ignore[dict-item]
        sharded.save_file(tmp_path / "model.pt")

    with caplog.at_level(logging.WARNING, "shardwise"):
        on_ranks(1, lambda: nn.Sequential(Counting(4, 3)), rank)
    assert caplog.text.count("it is not in this state dict") == 2
