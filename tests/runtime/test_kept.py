"""Modules that stay in float32 inside a model that computes in bf16, named by patterns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # which a checkpoint imports, and threads cannot do so at once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import on_ranks, seeded
from tests.parity.plain import Gradients, mean_in_rank_order
from tests.steps import STRATEGIES, assert_gradients, train

BF16, FP32 = torch.bfloat16, torch.float32
KEPT = sw.Precision(param_dtype=BF16, keep_in_fp32_modules=("norm*", "lm_head"))


def in_bf16_but_norms_and_head() -> nn.Module:
    """A plain model that does by hand what ``KEPT`` says."""
    model = seeded(nets.decoder)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ("norm", "norm1", "norm2", "lm_head"):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, __, output: output.bfloat16())
        else:
            for param in module.parameters(recurse=False):
                param.data = param.data.bfloat16()
    return model


def expected(world: int) -> Gradients:
    ranks = []
    for rank in range(world):
        model = in_bf16_but_norms_and_head()
        train(model, nets.decoder_batch(rank, 2))
        grads = {name: param.grad for name, param in model.named_parameters()}
        ranks.append({name: None if grad is None else grad.float() for name, grad in grads.items()})
    return mean_in_rank_order(ranks)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_full"])
def test_gradients_are_those_of_a_model_that_is_cast_by_hand(strategy: str) -> None:
    """Its norms and its head have inputs in float32, and outputs in bf16."""
    hybrid = strategy == "hybrid_full"
    world = 2 if not hybrid else 4
    truth = expected(world)

    def rank(comm: Comm, model: nn.Module) -> None:
        mesh = (4, 1) if hybrid else None
        sw.shard(model, strategy, comm=comm, precision=KEPT, mesh=mesh)
        train(model, nets.decoder_batch(comm.rank, 2))
        assert_gradients(model, truth)

    on_ranks(world, nets.decoder, rank)


def test_inside_they_see_float32_and_the_modules_around_them_bf16() -> None:
    dtypes: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}

    def rank(comm: Comm, model: nn.Module) -> str:
        def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            given = args[0].dtype if args[0].is_floating_point() else FP32
            dtypes[names[module]] = (given, next(module.parameters()).dtype, output.dtype)

        names = {module: name for name, module in model.named_modules()}
        for name in ("blocks.0.norm1", "blocks.0.attention", "lm_head"):
            model.get_submodule(name).register_forward_hook(note)
        sharded = sw.shard(model, comm=comm, precision=KEPT)
        assert model(nets.decoder_batch(0, 2)[0]).dtype is BF16
        return str(sharded.layout)

    [layout] = on_ranks(1, nets.decoder, rank)
    assert dtypes == {
        "blocks.0.norm1": (FP32, FP32, FP32),
        "blocks.0.attention": (BF16, BF16, BF16),
        "lm_head": (FP32, FP32, FP32),
    }
    titles = [line for line in layout.splitlines() if line.startswith("blocks.{")]
    assert [title.partition("(")[2].split(", gradients")[0] for title in titles] == [
        "stored float32, computed in float32",
        "stored float32, computed in bfloat16",
    ]


def test_a_model_held_in_bf16_stores_them_in_float32() -> None:
    def rank(comm: Comm, model: nn.Module) -> set[torch.dtype]:
        sw.shard(model.bfloat16(), comm=comm, precision=KEPT)
        stored = {name: param.dtype for name, param in model.named_parameters()}
        assert stored["embed.weight"] is BF16
        return {stored["blocks.1.norm2.weight"], stored["lm_head.weight"]}

    assert on_ranks(2, nets.decoder, rank) == [{FP32}] * 2


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("norm",), {"norm"}),
        (("norm?",), {"blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"}),
        (("blocks.1.norm*",), {"blocks.1.norm1", "blocks.1.norm2"}),
        (("blocks.1",), {"blocks.1.norm1", "blocks.1.norm2", "blocks.1.mlp"}),
    ],
)
def test_a_pattern_is_for_the_whole_name_of_a_module_or_its_last_part(
    patterns: tuple[str, ...], kept: set[str]
) -> None:
    modules = ["norm", "lm_head", *(f"blocks.{i}.{m}" for i in (0, 1) for m in ("norm1", "norm2"))]
    precision = sw.Precision(param_dtype=BF16, keep_in_fp32_modules=patterns)
    assert {m for m in [*modules, "blocks.1.mlp"] if precision.keeps(f"{m}.weight")} == kept


# ---- inputs of units ---------------------------------------------------------------------------


class Between(nn.Module):
    """Makes float32 tensors between its layers, and gives one in a keyword and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Scaled(), Scaled(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x, scale=Scale(torch.ones(8))).float().softmax(-1))
        out: Tensor = self.second(x.float(), scale=Scale(torch.ones(8)))
        return out


@dataclass
class Scale:
    of: Tensor
    names: tuple[str, ...] = ()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: Scale) -> Tensor:
        self.dtypes = [x.dtype, scale.of.dtype]
        out: Tensor = self.fc(x) * scale.of
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_are_cast_at_each_unit(strategy: str, checkpointing: bool) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        assert isinstance(model, Between)
        precision = sw.Precision(
            param_dtype=BF16, output_dtype=FP32, keep_in_fp32_modules=("norm",)
        )
        by = sw.wrap.by_class(Scaled, nn.LayerNorm)
        options: dict[str, Any] = {"activation_checkpointing": checkpointing}
        sw.shard(model, strategy, by, comm, precision=precision, **options)
        if not checkpointing:  # by the user: the recomputation calls the unit itself
            again = partial(checkpoint, model.second, use_reentrant=False)
            model.__dict__["second"] = again
        value = model(torch.ones(2, 8))
        assert value.dtype is FP32
        value.sum().backward()
        assert model.first.dtypes == [BF16, BF16]
        assert all(param.grad is not None for param in model.parameters())

    on_ranks(2, Between, rank)


def test_a_trace_casts_them_too() -> None:
    model = seeded(Between)
    options: dict[str, Any] = {"wrap": sw.wrap.by_class(Scaled)}
    options["precision"] = sw.Precision(param_dtype=BF16)
    traced = sw.trace(model, (torch.ones(2, 8),), "full_shard", (0, 2), **options)
    assert "bfloat16" in str(traced.forward)


def test_a_trace_computes_them_in_float32_too() -> None:
    """Otherwise the second product would have a bf16 input and a float32 weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.trace(
        model,
        torch.ones(1, 2),
        precision=sw.Precision(param_dtype=BF16, keep_in_fp32_modules=("1",)),
    )


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        ("nrom*", "'nrom\\*' matches no module of Decoder; nearest are 'norm', 'norm"),
        (
            "lm_head",
            "embed.weight and lm_head.weight are one parameter, and precision.keep_in_fp32_modules",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_model_changes(keep: str, why: str) -> None:
    model = seeded(nets.tied_decoder)
    with pytest.raises(sw.ConfigError, match=why):
        sw.shard(model, precision=sw.Precision(param_dtype=BF16, keep_in_fp32_modules=(keep,)))
    sw.shard(
        model,
        precision=sw.Precision(
            param_dtype=BF16, keep_in_fp32_modules=("norm*", "lm_head", "embed")
        ),
    )


def test_keep_needs_a_dtype_to_be_kept_from_and_is_a_tuple() -> None:
    with pytest.raises(sw.ConfigError, match=r"param_dtype is None, so .* Add param_dtype="):
        sw.Precision(keep_in_fp32_modules=("norm",))
    with pytest.raises(sw.ConfigError, match=r"write \('norm',\), a tuple"):
        sw.Precision(param_dtype=BF16, keep_in_fp32_modules="norm")
