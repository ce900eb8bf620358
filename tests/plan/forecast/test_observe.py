"""One observed step beside a real one: the same operations, and the same bytes kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.config.precision import Precision
from shardwise.errors import ScheduleError
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.work import StepWork
from shardwise.plan.order import rehearse
from shardwise.plan.units.selection import checkpointed
from shardwise.plan.units.units import choose_units
from shardwise.recipe.model_config import ModelConfig
from shardwise.setup.recompute import offload, recompute
from shardwise.train.decoder import Decoder
from tests.fake import FakeComm
from tests.nets import (
    NETS,
    Attention,
    Batch,
    Net,
    decoder,
    decoder_batch,
    loss,
    mostly_frozen,
    unused_expert,
)

LLAMA = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48)
IDS = torch.zeros(3, 16, dtype=torch.long)
NUMBER = 8  # bytes of a number of Python that torch makes a tensor of, which no mode sees
OBSERVED = [net for net in NETS if net.build is not unused_expert]  # which looks at values
EVERY = [None, ActivationCheckpointing(), ActivationCheckpointing(offload=True)]


def llama() -> nn.Module:
    return Decoder(LLAMA, vocabulary=40, context=16)


def cross_entropy(logits: Tensor) -> Tensor:
    targets = torch.zeros_like(logits[..., 0], dtype=torch.long)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def of_llama(checkpointing: ActivationCheckpointing | None = None) -> StepWork:
    model = llama()
    return observe(model, choose_units(model), (IDS,), {}, checkpointing, loss=cross_entropy)


def of_net(model: nn.Module, batch: Batch) -> StepWork:
    *inputs, target = batch
    on_meta = target.to("meta")

    def of_output(output: Tensor) -> Tensor:
        return loss(nn.Identity(), (output, on_meta))

    return observe(model, choose_units(model), inputs, {}, loss=of_output)


def kept(forward: Callable[[], Tensor]) -> int:
    """Bytes that are alive after a real forward pass and were not before."""
    gc.collect()  # else what other tests have left may be freed meanwhile
    with profile(use_kineto=False, profile_memory=True) as events:
        output = forward()
    assert output.requires_grad
    # The mean of squares keeps the memory in which it was computed.
    unused: int = output.untyped_storage().nbytes() - output.nbytes
    allocated: int = sum(event.self_cpu_memory_usage for event in events.function_events)
    return allocated - unused


# ---- operations --------------------------------------------------------------------------------


def test_the_operations_of_a_llama_are_those_of_the_formula() -> None:
    tokens, width, hidden, length = 48, 32, 48, 16
    attended = 2 * 2 * tokens * length * width  # scores, and the mixture of values
    projections = 2 * tokens * width * (width + 2 * width // 2 + width)
    mlp = 2 * tokens * width * hidden * 3
    head = 2 * tokens * width * 40
    products = 2 * (projections + mlp) + head
    work = of_llama()
    assert work.tokens == tokens
    # Backward, each product has two; of attention the scores are made once more.
    assert work.flops == 3 * products + 2 * (attended + attended // 2 * 5)
    block = work.units["model.layers.0"]
    assert block.forward.flops == projections + mlp + attended


@pytest.mark.parametrize("net", OBSERVED, ids=str)
def test_the_operations_of_any_net_are_those_that_torch_counts(net: Net) -> None:
    model, batch = net.build(), net.batch(0, 2)
    with FlopCounterMode(display=False) as counter:
        loss(model, batch).backward()
    work = of_net(model, batch)
    assert work.flops == counter.get_total_flops()


def test_what_is_recomputed_is_told_apart() -> None:
    plain, recomputed = of_llama(), of_llama(ActivationCheckpointing())
    assert plain.flops == recomputed.flops
    first, again = (work.units["model.layers.1"] for work in (plain, recomputed))
    assert first.recomputed.kernels == 0
    # The last product's inputs are there before it is made once more.
    down = 2 * 48 * 32 * 48
    assert again.recomputed.flops == first.forward.flops - down
    assert again.backward.flops == first.backward.flops + again.recomputed.flops


def test_each_gradient_counts_when_it_comes() -> None:
    work = of_llama()
    for unit in work.units.values():
        assert unit.forward.gradients == 0
    layers = [unit.backward.gradients for name, unit in work.units.items() if "layers" in name]
    assert {*layers} == {9}  # seven products and two norms


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", EVERY, ids=str)
def test_the_bytes_kept_are_those_of_a_real_step(
    checkpointing: ActivationCheckpointing | None,
) -> None:
    work, model = of_llama(checkpointing), llama()
    picked = checkpointed(checkpointing, choose_units(model)) if checkpointing else []
    for module in picked:
        module.forward = recompute(module)
        if checkpointing and checkpointing.offload:
            module.forward = offload(module, torch.device("cpu"))
    random_states = len(picked) * torch.get_rng_state().nbytes  # which have no storage on meta
    in_host = sum(unit.in_host for unit in work.units.values())
    assert work.saved + in_host == kept(lambda: cross_entropy(model(IDS))) - random_states
    assert (in_host > 0) is (checkpointing is EVERY[2])


@pytest.mark.parametrize("net", OBSERVED, ids=str)
def test_the_bytes_that_any_net_keeps_are_those_of_a_real_step(net: Net) -> None:
    model, batch = net.build(), net.batch(0, 2)
    work, real = of_net(model, batch), kept(lambda: loss(model, batch))
    scales = [module for module in model.modules() if isinstance(module, Attention)]
    assert real - work.saved == NUMBER * len(scales)


@pytest.mark.parametrize(
    ("times", "precision", "fewer"),
    [
        (1, Precision(), 1),
        (2, Precision(), 1),  # what the second call adds has memory of its own
        (1, Precision(param_dtype=torch.bfloat16), 0),  # its bucket is wider
    ],
)
def test_gradients_that_are_computed_in_the_engine_s_memory_are_none_of_the_model(
    times: int, precision: Precision, fewer: int
) -> None:
    linear = nn.Linear(512, 512, bias=False)
    model = nn.Sequential(*[linear] * times)
    units, x = choose_units(model), torch.zeros(2, 512)

    def most(in_slot: bool) -> int:
        work = observe(model, units, (x,), {}, precision=precision, in_slot=in_slot)
        return max(span.peak for span in work.backward)

    plain, ours = most(in_slot=False), most(in_slot=True)
    assert (plain - ours) / linear.weight.nbytes == pytest.approx(fewer, abs=0.01)
    assert "forward" not in vars(linear)


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4_096, 64)
        self.head = nn.Linear(64, 4_096, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` → ``[tokens, 4096]``."""
        logits: torch.Tensor = self.head(self.words(ids))
        return logits


def test_the_gradient_of_a_tied_embedding_has_no_memory_beside_its_slot() -> None:
    """By the ordinary way the head and the embedding have one each before they are added."""
    model, ids = Tied(), torch.zeros(2, dtype=torch.int64)
    whole = 4_096 * 64 * 4

    def most(in_slot: bool) -> float:
        work = observe(model, choose_units(model), (ids,), {}, in_slot=in_slot)
        return max(span.peak for span in work.backward) / whole

    assert most(in_slot=False) > 1.9
    assert most(in_slot=True) < 0.1


def test_every_byte_that_is_made_ends_in_the_span_that_uses_it_last() -> None:
    work = of_llama()
    assert sum(span.grown for span in (*work.forward, *work.backward)) == 0
    assert sum(span.grown for span in work.forward) == work.saved
    assert all(span.peak >= max(span.grown, 0) for span in (*work.forward, *work.backward))
    blocks = [span for span in work.backward if span.unit == "model.layers.1"]
    assert [-span.grown for span in blocks] == [work.units["model.layers.1"].saved]


def test_cues_are_those_of_a_rehearsal() -> None:
    model = llama()
    units = choose_units(model)
    assert of_llama().order == rehearse(model, units, (IDS,), {})


def test_narrow_parameters_make_narrow_activations() -> None:
    model, precision = decoder(), sw.Precision(param_dtype=torch.bfloat16)
    ids, _ = decoder_batch(0, 2)
    wide, narrow = (
        observe(model, choose_units(model), (ids,), {}, None, given)
        for given in (sw.Precision(), precision)
    )
    block = "blocks.0"
    assert narrow.units[block].saved < 0.6 * wide.units[block].saved


def test_frozen_parameters_keep_less_and_have_fewer_products() -> None:
    ids, _ = decoder_batch(0, 2)
    model = mostly_frozen()
    lora = observe(model, choose_units(model), (ids,), {})
    assert lora.units["blocks.1"].backward.flops < 2 * lora.units["blocks.1"].forward.flops


# ---- the model ---------------------------------------------------------------------------------


def test_a_sharded_model_is_observed_whole_and_stays_as_it_is() -> None:
    ids, _ = decoder_batch(0, 2)
    model = decoder()
    units = choose_units(model)
    plain = observe(model, units, (ids,), {}, ActivationCheckpointing())
    sharded = sw.shard(model, comm=FakeComm(1, 4))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with sharded._detached():
        assert observe(model, sharded.units, (ids,), {}, ActivationCheckpointing()) == plain
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(param.grad is None for param in after.values())
    assert "forward" not in vars(model.get_submodule("blocks.0"))


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_model_that_looks_at_values_cannot_be_observed() -> None:
    model = Looks(4, 4)
    with pytest.raises(ScheduleError, match=r"depends on values.* Run a step: it shows"):
        observe(model, choose_units(model), (torch.ones(2, 4),), {})


class Folds(nn.Linear):
    """Registers its weight anew in each call, as peft's adapters of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self, "weight", nn.Identity())
        y = super().forward(x)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return y


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_module_registers_anew_is_its_parameter_afterwards(
    dtype: torch.dtype | None,
) -> None:
    model = nn.Sequential(Folds(4, 4), Folds(4, 4))
    before = {name: id(param) for name, param in model.named_parameters()}
    work = observe(model, choose_units(model), (torch.ones(2, 4),), {}, precision=Precision(dtype))
    assert work.flops == 5 * 2 * 2 * 4 * 4  # the input has no gradient
    rehearse(model, choose_units(model), (torch.ones(2, 4),), {})
    assert {name: id(param) for name, param in model.named_parameters()} == before


@pytest.mark.parametrize("caches", [True, False])  # without, masks look for packed rows
def test_models_of_transformers_bring_their_loss(caches: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40, attn_implementation="sdpa",
        use_cache=caches,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    batch = {"input_ids": IDS, "labels": IDS}
    work = observe(model, choose_units(model), (), batch)
    assert work.flops == of_llama().flops
    assert work.saved == kept(lambda: model(**batch).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_products_of_a_tokens_experts_are_counted_in_any_dtype(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(dtype)
    batch = {"input_ids": IDS, "labels": IDS}
    work = observe(model, choose_units(model), (), batch)
    router = 2 * 48 * 32 * 4
    one_expert = 2 * 48 * 32 * 48 * 3  # of a Llama, whose MLP is as wide
    assert work.flops == of_llama().flops + 3 * 2 * (router + one_expert)
    assert work.saved == kept(lambda: model(**batch).loss)


# ---- the backward pass -------------------------------------------------------------------------


class Aside(nn.Module):
    """One layer whose output is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.aside = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x) + self.aside(x).detach()
        return out


class Reentrant(nn.Module):
    """Layers that are recomputed in the reentrant way, which has no graph in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        given = x if x.requires_grad else x.clone().requires_grad_()
        out: Tensor = checkpoint(self.inner, given, use_reentrant=True)
        return out


class Box:
    """No container that torch knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxes(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Boxed(nn.Module):
    """A unit that returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Boxes(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(x).value)
        return out


class Branches(nn.Module):
    """Layers that are given the same, or what is given to one far behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out, self.skip = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu() if x.requires_grad else x
        given: Tensor = torch.tanh(self.k(x) * self.q(x))
        out: Tensor = self.skip(given) + self.out(given.cos())
        return out


@pytest.mark.parametrize("part", [Aside, Reentrant, Boxed, Branches])
def test_the_backward_pass_comes_to_the_units_of_a_real_one(part: type[nn.Module]) -> None:
    model = nn.Sequential(part(), part(), nn.Linear(4, 4))
    x, wrap = torch.ones(2, 4), sw.wrap.by_class(nn.Linear)
    work = observe(model, choose_units(model, wrap), (x,), {})
    sharded = sw.shard(model, wrap=wrap)
    for _ in range(2):
        model(x).sum().backward()
    assert work.order == sharded.runtime.schedules.orders["train"]
