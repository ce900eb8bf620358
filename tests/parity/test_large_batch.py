"""Parity, form (b): W ranks equal one process with all their rows in one large batch.

Not bit for bit: the large batch sums its rows in another order. What is left must be rounding.
Adam divides by the root of the second moment, and where a gradient is nearly nothing it divides
rounding by rounding; an eps of 1e-4 keeps that out. Momentum and Adam carry an error on, so one
step that went wrong would show in all that follow.

The convolutional net cannot take part: its batch norm normalises by the mean and variance of the
rows it sees, and a rank sees its own. That is so for any data parallelism without synchronised
batch norm. What holds for it instead: form (a) (``test_one_by_one``), and form (b) with its batch
norm in evaluation mode, where rows do not see each other.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests import nets
from tests.nets import NETS, Net
from tests.parity.meta import built_on_meta, init_of, made_whole
from tests.parity.plain import MakeOptimizer, Plain, Recipe, large_batch
from tests.parity.sharded import How, Sharded, assert_close, off, on_threads

# Small steps: a one-element parameter that crosses zero has no maximum to compare with.
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAM: MakeOptimizer = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
each_optimizer = pytest.mark.parametrize(
    ("optimizer", "tolerance"), [(SGD, 1e-5), (ADAM, 2e-5)], ids=["SGD", "Adam"]
)
MIXES_ROWS = Net(nets.odd_convnet, nets.odd_convnet_batch)
AWKWARD = [net for net in NETS if net != MIXES_ROWS and net.build is not nets.decoder]
WORLDS = (1, 2, 3, 4, 5)


@each_optimizer
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("net", AWKWARD, ids=str)
def test_ranks_equal_one_large_batch_up_to_rounding(
    net: Net, world: int, optimizer: MakeOptimizer, tolerance: float
) -> None:
    recipe = Recipe.of(net, optimizer, steps=3)
    ranks, large = on_threads(world, recipe, How()), large_batch(recipe, world)
    assert_losses_close(ranks, large)
    assert_close(ranks, large, tolerance)


@each_optimizer
@pytest.mark.parametrize("world", WORLDS)
def test_a_model_built_on_the_meta_device_equals_one_large_batch(
    world: int, optimizer: MakeOptimizer, tolerance: float
) -> None:
    net = Net(nets.tied_decoder, nets.tied_decoder_batch)
    recipe = Recipe(lambda: built_on_meta(net), net.batch, optimizer, steps=3)
    large = large_batch(recipe, world, made_whole(net))
    ranks = on_threads(world, recipe, How(each_rank=init_of))
    assert_losses_close(ranks, large)
    assert_close(ranks, large, tolerance)


def test_micro_batches_on_ranks_equal_one_large_batch_up_to_rounding() -> None:
    recipe = Recipe(nets.tied_decoder, nets.tied_decoder_batch, SGD, micro=3)
    ranks, large = on_threads(2, recipe, How()), large_batch(recipe, 2)
    assert_losses_close(ranks, large)
    assert_close(ranks, large, 1e-5)


@each_optimizer
@pytest.mark.parametrize("world", WORLDS)
def test_batch_norm_that_does_not_see_its_batch_equals_one_large_batch(
    world: int, optimizer: MakeOptimizer, tolerance: float
) -> None:
    recipe = Recipe.of(MIXES_ROWS, optimizer)
    ranks = on_threads(world, recipe, How(dress=nn.Module.eval))
    large = large_batch(recipe, world, recipe.model().eval())
    assert_losses_close(ranks, large)
    assert_close(ranks, large, tolerance)


def test_batch_norm_that_sees_its_batch_does_not() -> None:
    recipe = Recipe.of(MIXES_ROWS, SGD)
    ranks, large = on_threads(2, recipe, How()), large_batch(recipe, 2)
    assert off(ranks[0].state, large.states[0], 1e-2)


def assert_losses_close(ranks: list[Sharded], large: Plain) -> None:
    """The mean over ranks and micro-batches is the large batch's loss, step by step."""
    steps = len(large.losses[0])
    # ranks × the micro-batches of all steps
    losses = torch.tensor([rank.losses for rank in ranks], dtype=torch.float64)
    means = losses.view(len(ranks), steps, -1).mean(dim=(0, 2))
    assert means.tolist() == pytest.approx(large.losses[0], rel=1e-6, abs=0)
