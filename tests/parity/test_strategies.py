"""The four strategies give the same bits, on threads and on processes, in fp32 and in bf16.

Everything that could round differently is in the run: accumulation, clipping, weight decay, tied
and unevenly split parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.parity.plain import (
    Gradients,
    Plain,
    Recipe,
    mean_in_rank_order,
    one_by_one,
    put_gradients,
)
from tests.parity.sharded import (
    How,
    Sharded,
    assert_equal,
    differing,
    distance,
    flat,
    on_threads,
    train,
    whole_gradients,
)
from tests.ranks import run_processes
from tests.steps import STRATEGIES

RECIPE = Recipe(
    nets.tied_decoder,
    nets.tied_decoder_batch,
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    micro=2,
)
CLIPPED = How(clip=0.5)
IN_BF16 = How(options={"precision": sw.Precision(param_dtype=torch.bfloat16)})


def test_the_strategies_are_bit_identical_on_threads() -> None:
    assert_identical({name: on_threads(3, RECIPE, CLIPPED.by(name)) for name in STRATEGIES})


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize("world", [2, 3])
def test_the_strategies_are_bit_identical_on_processes_and_like_on_threads(world: int) -> None:
    by_rank = run_processes(world, in_every_strategy)
    runs = {name: [rank[name] for rank in by_rank] for name in STRATEGIES}
    assert_identical(runs | {"threads": on_threads(world, RECIPE, CLIPPED)})


def in_every_strategy(comm: Comm) -> dict[str, Sharded]:
    return {name: train(comm, RECIPE.model(), RECIPE, CLIPPED.by(name)) for name in STRATEGIES}


def test_clipping_uses_the_norm_of_the_whole_gradient() -> None:
    ranks = on_threads(3, RECIPE, CLIPPED)
    gradients = one_by_one(RECIPE, 3).gradients[0]
    norm = torch.cat([g.flatten() for g in gradients.values() if g is not None]).norm().item()
    assert norm > 0.5, "nothing would be clipped"
    assert [rank.norms[0] for rank in ranks] == [pytest.approx(norm, rel=1e-6)] * 3


@pytest.mark.parametrize(
    "wire", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.prove)], ids=str
)
def test_bf16_compute_is_bit_identical_across_strategies(wire: torch.dtype) -> None:
    """The tied weight has a gradient from each of its uses, and they must be added alike."""
    precision = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=wire)
    how = How(options={"precision": precision})
    assert_identical({name: on_threads(3, RECIPE, how.by(name)) for name in STRATEGIES})


@pytest.mark.prove
def test_bf16_compute_is_near_fp32_and_keeps_fp32_masters() -> None:
    wide, narrow = on_threads(3, RECIPE, How()), on_threads(3, RECIPE, IN_BF16)
    for before, after in zip(wide, narrow, strict=True):
        assert after.dtypes == {torch.float32}
        assert after.losses != before.losses
        assert after.losses == pytest.approx(before.losses, rel=0.02)
        assert {value.dtype for value in after.state.values()} == {torch.float32}
    first = whole_gradients(wide, 0, "full_shard"), whole_gradients(narrow, 0, "full_shard")
    assert max(distance(first[1][name], first[0][name]) for name in first[0]) < 0.05


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [3, 1])
def test_bf16_compute_equals_a_plain_bf16_model_with_fp32_masters(
    world: int, strategy: str
) -> None:
    recipe = Recipe(RECIPE.build, RECIPE.batch, RECIPE.optimizer)
    plain = one_by_one_in_bf16(recipe, world)
    assert_equal(on_threads(world, recipe, IN_BF16.by(strategy)), plain, strategy)


def one_by_one_in_bf16(recipe: Recipe, world: int) -> Plain:
    """bf16 computes and travels, fp32 sums and is stepped on."""
    masters, model = recipe.model(), recipe.model().to(torch.bfloat16)
    optimizer = recipe.optimizer(masters.parameters())
    losses: list[list[float]] = [[] for _ in range(world)]
    gradients: list[Gradients] = []
    for step in range(recipe.steps):
        model.load_state_dict(masters.state_dict())
        parts = []
        for rank in range(world):
            model.zero_grad()
            value = recipe.loss(model, recipe.batches(step, rank)[0])
            value.backward()
            losses[rank].append(value.item())
            parts.append({n: wide(p.grad) for n, p in model.named_parameters()})
        gradients.append(mean_in_rank_order(parts))
        put_gradients(masters, gradients[-1])
        optimizer.step()
    return Plain(losses, gradients, [masters.state_dict()] * world)


def wide(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.float()


def assert_identical(runs: Mapping[str, Sequence[Sharded]]) -> None:
    """Losses, norms, gradients and final states of every run, bit for bit."""
    first_name, first = next(iter(runs.items()))
    gradients = [flat(whole_gradients(first, step, first_name)) for step in range(RECIPE.steps)]
    for name, ranks in runs.items():
        for rank, other in zip(ranks, first, strict=True):
            assert rank.losses == other.losses, name
            assert rank.norms == other.norms, name
            assert differing(rank.state, other.state) == [], name
        for step, expected in enumerate(gradients):
            assert differing(flat(whole_gradients(ranks, step, name)), expected) == [], name
