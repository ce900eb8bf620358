"""Parity, form (a): W ranks equal one plain process that plays them in turn, bit for bit.

Losses, every step's gradients, and every parameter and buffer at the end: at worlds 1 to 5, in
every strategy, under SGD (which shows a wrong scale of gradients) and AdamW (which shows
gradients where there should be none).
"""

from __future__ import annotations

import pytest

import shardwise as sw
from tests import nets
from tests.nets import NETS, Net
from tests.parity.meta import built_on_meta, init_of, made_whole
from tests.parity.plain import OPTIMIZERS, SGD, Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.steps import STRATEGIES

WORLDS = (1, 2, 3, 4, 5)
AWKWARD = [net for net in NETS if net.build is not nets.decoder]  # the tied one does all it does
FROM_META = (
    Net(nets.tied_decoder, nets.tied_decoder_batch),
    Net(nets.odd_convnet, nets.odd_convnet_batch),
)


STRONGEST_FIRST = STRATEGIES[::-1]  # which a plain run of the suite pairs with most nets


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRONGEST_FIRST)
@pytest.mark.parametrize("net", AWKWARD, ids=str)
def test_ranks_equal_one_process_that_plays_them_in_turn(
    net: Net, strategy: str, optimizer: str, world: int
) -> None:
    recipe = Recipe.of(net, OPTIMIZERS[optimizer])
    plain = one_by_one(recipe, world)
    assert plain.losses[0][0] != plain.losses[0][-1]
    assert_equal(on_threads(world, recipe, How(strategy)), plain, strategy)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRONGEST_FIRST)
@pytest.mark.parametrize("nbytes", [10_000, 1 << 20], ids=["some", "all"])
def test_units_of_joined_neighbours_equal_one_process(
    nbytes: int, strategy: str, world: int
) -> None:
    recipe = Recipe.of(FROM_META[0], OPTIMIZERS["adamw"])
    joined = How(strategy, sw.wrap.automatic(joined_nbytes=nbytes))
    assert_equal(on_threads(world, recipe, joined), one_by_one(recipe, world), strategy)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRONGEST_FIRST)
@pytest.mark.parametrize("net", FROM_META, ids=str)
def test_a_model_built_on_the_meta_device_equals_one_made_whole(
    net: Net, strategy: str, world: int
) -> None:
    plain = one_by_one(Recipe.of(net, SGD), world, made_whole(net))
    recipe = Recipe(lambda: built_on_meta(net), net.batch, SGD)
    ranks = on_threads(world, recipe, How(strategy, each_rank=init_of))
    assert_equal(ranks, plain, strategy)
