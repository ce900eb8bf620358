"""Parity, form (b), with the flat fused optimizers: W ranks equal one plain process.

The plain process steps by torch's loop, whose sums round otherwise than a fused kernel does, so
the comparison is the one with a large batch: up to rounding. That every strategy gives the same
bits, also when it clips by itself, is in ``tests/optim/test_flat``; here once more on processes
that share memory, where the optimizer writes straight into what its peers read next.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.machine.connect import over
from shardwise.optim.update import Update
from tests import nets
from tests.copies import assert_near
from tests.nets import NETS, Net
from tests.parity.plain import MakeOptimizer, Recipe, large_batch, one_by_one
from tests.parity.sharded import How, Sharded, assert_close, differing, on_threads, train
from tests.ranks import gloo_group, outcomes_of
from tests.steps import STRATEGIES

ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-4}
BY_TORCH: MakeOptimizer = partial(torch.optim.AdamW, **ADAMW)
HOW = How(optimizer=partial(sw.optim.AdamW, **ADAMW))
TOLERANCE = 2e-5
AWKWARD = [n for n in NETS if n.build not in (nets.decoder, nets.odd_convnet)]
TIED = Net(nets.tied_decoder, nets.tied_decoder_batch)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("net", AWKWARD, ids=str)
def test_ranks_equal_one_large_batch_up_to_rounding(net: Net, world: int) -> None:
    """Frozen, tied, unused and scalar parameters."""
    recipe = Recipe.of(net, BY_TORCH, steps=3)
    assert_close(on_threads(world, recipe, HOW), large_batch(recipe, world), TOLERANCE)


def test_batch_norm_that_does_not_see_its_batch_equals_one_large_batch() -> None:
    recipe = Recipe.of(Net(nets.odd_convnet, nets.odd_convnet_batch), BY_TORCH)
    ranks = on_threads(3, recipe, replace(HOW, dress=nn.Module.eval))
    assert_close(ranks, large_batch(recipe, 3, recipe.model().eval()), TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_equal_one_large_batch_up_to_rounding(strategy: str) -> None:
    recipe = Recipe.of(TIED, BY_TORCH, micro=3)
    ranks = on_threads(2, recipe, HOW.by(strategy))
    assert_close(ranks, large_batch(recipe, 2), TOLERANCE)


def test_the_losses_are_those_of_the_plain_process_that_plays_the_ranks_in_turn() -> None:
    recipe = Recipe.of(TIED, BY_TORCH)
    ranks, plain = on_threads(3, recipe, HOW), one_by_one(recipe, 3)
    for rank, losses, state in zip(ranks, plain.losses, plain.states, strict=True):
        assert rank.losses == pytest.approx(losses, rel=1e-6, abs=0)
        assert_near(rank.state, state, TOLERANCE)


@pytest.mark.prove
def test_bf16_compute_keeps_fp32_masters() -> None:
    recipe = Recipe.of(TIED, BY_TORCH)
    narrow = replace(HOW, options={"precision": sw.Precision(param_dtype=torch.bfloat16)})
    runs = {strategy: on_threads(3, recipe, narrow.by(strategy)) for strategy in STRATEGIES}
    for ranks in runs.values():
        assert all(rank.dtypes == {torch.float32} for rank in ranks)
        assert_same(ranks, runs["no_shard"])
    wide = on_threads(3, recipe, HOW)
    assert runs["full_shard"][0].losses != wide[0].losses
    assert runs["full_shard"][0].losses == pytest.approx(wide[0].losses, rel=0.02)


def assert_same(ranks: list[Sharded], others: list[Sharded]) -> None:
    for rank, other in zip(ranks, others, strict=True):
        assert rank.losses == other.losses
        assert differing(rank.state, other.state) == []


# ---- over shared memory --------------------------------------------------------------------


MUON = How(optimizer=partial(sw.optim.Muon, lr=0.02))
RUNS = [(HOW, None), (HOW, torch.bfloat16), (MUON, None)]
SHARED = Recipe.of(TIED, BY_TORCH, micro=2)


def over_shared_memory(rank: int, world: int, folder: str) -> list[Sharded]:
    states = []
    with gloo_group(rank, world, folder):
        for optimizer, compute in RUNS:
            how = replace(optimizer, options={"precision": sw.Precision(param_dtype=compute)})
            with over(dist.group.WORLD, transport="memory") as comm:
                states.append(train(comm, SHARED.model(), SHARED, how))
    return states


@pytest.mark.spawn
@pytest.mark.prove
def test_over_shared_memory_it_gives_the_bits_that_threads_give() -> None:
    outcomes = outcomes_of(2, over_shared_memory)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    runs = [list(ranks) for ranks in zip(*(outcome.value for outcome in outcomes), strict=True)]
    for ranks, (optimizer, compute) in zip(runs, RUNS, strict=True):
        how = replace(optimizer, options={"precision": sw.Precision(param_dtype=compute)})
        assert_same(ranks, on_threads(2, SHARED, how))
    assert_close(runs[0], large_batch(SHARED, 2), TOLERANCE)


# ---- the comparison can fail -----------------------------------------------------------------


def test_a_step_that_is_taken_twice_is_far_away() -> None:
    class Twice(sw.optim.AdamW):
        elementwise = True

        def _carry_out(self, update: Update, gradients: list[Tensor], scale: Tensor | None) -> None:
            super()._carry_out(update, gradients, scale)
            super()._carry_out(update, gradients, scale)

    recipe = Recipe.of(TIED, BY_TORCH)
    ranks = on_threads(2, recipe, How(optimizer=partial(Twice, **ADAMW)))
    with pytest.raises(AssertionError):
        assert_close(ranks, large_batch(recipe, 2), 1e-2)
