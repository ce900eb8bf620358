"""Parity, form (a), in every mode of operation; and the comparison itself, shown planted bugs.

How parameters are grouped, when they are gathered and what is recomputed may change speed and
memory, and nothing else: each mode gives the bits of the plain process that knows no modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.reduction import Reduction
from shardwise.config.precision import Dtypes, Precision
from shardwise.memory import gradients
from tests import nets
from tests.nets import NETS, Net
from tests.parity.plain import SGD, Gradients, Plain, Recipe, mean_in_rank_order, one_by_one
from tests.parity.sharded import (
    How,
    Sharded,
    assert_equal,
    differing,
    distance,
    flat,
    off,
    on_threads,
    whole_gradients,
)
from tests.steps import STRATEGIES

WORLD = 3
# A step by the guessed order, one by the recorded order, and one that shows what that did.
RECIPE = Recipe(nets.tied_decoder, nets.tied_decoder_batch, SGD, steps=3)
FAR = 1 << 30  # bytes: more than everything


def option(**options: Any) -> How:
    return How(options=options)


def prefetch(**depths: Any) -> How:
    return option(prefetch=sw.Prefetch(**depths))


MODES = {
    "a bucket per parameter": option(bucketing="none"),
    "a bucket per layer": option(bucketing="layer"),
    "one unit": How(wrap=sw.wrap.whole()),
    "units by size": How(wrap=sw.wrap.by_size(300)),
    "units by class": How(wrap=sw.wrap.by_class("Mlp", nets.Attention)),
    "units by hand": How(wrap=sw.wrap.by_hand("blocks.1", ("blocks.0", "blocks.2"), "norm")),
    "no prefetch": prefetch(forward=0, backward=0),
    "everything prefetched": prefetch(forward=FAR, backward=FAR),
    "prefetch after a unit's backward": prefetch(when="post"),
    "one gather in flight": prefetch(forward=FAR, backward=FAR, limit=1),
    "units recomputed": option(activation_checkpointing=True),
    "units recomputed, a bucket per parameter": option(
        activation_checkpointing=True, bucketing="none"
    ),
}

PROVED = ("one unit", "units by size", "everything prefetched", "units recomputed")


@pytest.fixture(scope="module")
def plain() -> Plain:
    return one_by_one(RECIPE, WORLD)


# The strategy that does all that a mode may change comes first: most modes are run with it alone.
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize(
    "how",
    [pytest.param(h, marks=pytest.mark.prove if n in PROVED else ()) for n, h in MODES.items()],
    ids=list(MODES),
)
def test_a_mode_changes_no_bit(how: How, strategy: str, plain: Plain) -> None:
    assert_equal(on_threads(WORLD, RECIPE, how.by(strategy)), plain, strategy)


@pytest.mark.prove
@pytest.mark.parametrize("bucketing", ["none", "layer"])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_finer_buckets_change_no_bit_of_awkward_models(net: Net, bucketing: str) -> None:
    recipe = Recipe.of(net, SGD)
    plain = one_by_one(recipe, WORLD)
    assert_equal(on_threads(WORLD, recipe, option(bucketing=bucketing)), plain, "full_shard")


# --- checkpointing by the model itself -------------------------------------------------------


class Recomputing(nets.Decoder):
    """Its blocks are checkpointed from outside, as most models do it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(tied=True)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        out: Tensor = self.lm_head(self.norm(x))
        return out


@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bucketing", ["none", "block"])
def test_checkpoints_around_blocks_change_no_bit(
    reentrant: bool, bucketing: str, strategy: str, plain: Plain
) -> None:
    recipe = replace(RECIPE, build=lambda: Recomputing(reentrant=reentrant))
    how = option(bucketing=bucketing).by(strategy)
    assert_equal(on_threads(WORLD, recipe, how), plain, strategy)


# --- accumulation ----------------------------------------------------------------------------

ACCUMULATING = replace(RECIPE, micro=3)


@pytest.mark.prove
def test_accumulated_gradients_are_summed_on_each_rank_first() -> None:
    plain = one_by_one(ACCUMULATING, WORLD)
    for strategy in STRATEGIES:
        assert_equal(on_threads(WORLD, ACCUMULATING, How(strategy)), plain, strategy)


@pytest.mark.prove
def test_gradients_that_are_reduced_at_once_are_summed_over_ranks_first() -> None:
    for strategy in STRATEGIES:
        ranks = on_threads(WORLD, ACCUMULATING, How(strategy, syncs_always=True))
        first = whole_gradients(ranks, 0, strategy)
        assert differing(first, flat(summed_over_ranks_first())) == [], strategy


@pytest.mark.parametrize("always", [False, True], ids=["once a step", "every micro-batch"])
def test_both_equal_plain_accumulation_up_to_rounding(always: bool) -> None:
    ranks = on_threads(WORLD, ACCUMULATING, How(syncs_always=always))
    first, expected = whole_gradients(ranks, 0, "full_shard"), flat(accumulated_plainly())
    assert off(first, expected, 5e-6) == {}  # without AVX, 1.1e-6


def summed_over_ranks_first() -> Gradients:
    """The first step's gradient: each micro-batch is averaged over ranks, then added."""
    model, total = ACCUMULATING.model(), dict[str, Tensor]()
    for part in range(ACCUMULATING.micro):
        by_rank = []
        for rank in range(WORLD):
            model.zero_grad()
            loss_of_a_part(model, rank, part).backward()
            by_rank.append({name: param.grad for name, param in model.named_parameters()})
        for name, mean in mean_in_rank_order(by_rank).items():
            assert mean is not None
            total[name] = total[name] + mean if name in total else mean
    return total


def accumulated_plainly() -> Gradients:
    """The first step's gradient as a plain loop over all micro-batches leaves it in ``.grad``."""
    model = ACCUMULATING.model()
    for rank in range(WORLD):
        for part in range(ACCUMULATING.micro):
            (loss_of_a_part(model, rank, part) / WORLD).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def loss_of_a_part(model: Any, rank: int, part: int) -> Tensor:
    return ACCUMULATING.loss(model, ACCUMULATING.batches(0, rank)[part]) / ACCUMULATING.micro


# --- the comparison can fail -----------------------------------------------------------------


def sums_instead_of_averaging(patch: pytest.MonkeyPatch) -> None:
    def without_divisor(_: Precision, dtypes: Dtypes, __: int) -> Reduction:
        return Reduction(dtypes.reduce, dtypes.sum)

    patch.setattr(Precision, "reduction", without_divisor)


def loses_gradients(patch: pytest.MonkeyPatch, lost: Callable[[int, bool], bool]) -> None:
    collect = gradients.Gradients.collect

    def forgetful(mine: gradients.Gradients, index: int, grad: Tensor, carried: bool) -> bool:
        grad = torch.zeros_like(grad) if lost(mine.spec.rank, carried) else grad
        return collect(mine, index, grad, carried)

    patch.setattr(gradients.Gradients, "collect", forgetful)


def drops_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    loses_gradients(patch, lambda _, carried: not carried)


def drops_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    loses_gradients(patch, lambda rank, _: rank == WORLD - 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "bug", [sums_instead_of_averaging, drops_the_last_micro_batch, drops_the_last_rank]
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one(ACCUMULATING, WORLD)
    bug(monkeypatch)
    ranks = on_threads(WORLD, ACCUMULATING, How(strategy))
    with pytest.raises(AssertionError):
        assert_equal(ranks, expected, strategy)
    # Gradients and final parameters each show it, without the other's help and by far.
    first = whole_gradients(ranks, 0, strategy), flat(expected.gradients[0])
    assert min(distance(first[0][name], first[1][name]) for name in first[0]) > 1e-3
    assert off(ranks[0].state, expected.states[0], 1e-3)


def test_one_bit_is_found_wherever_it_is(plain: Plain) -> None:
    ranks = on_threads(WORLD, RECIPE, How())
    assert_equal(ranks, plain, "full_shard")
    last = ranks[-1]
    worse: list[Callable[[], Sharded]] = [
        lambda: replace(last, losses=[*last.losses[:-1], last.losses[-1] + 1e-6]),
        lambda: replace(last, state=nudged(last.state)),
        lambda: replace(last, gradients=[*last.gradients[:-1], nudged(last.gradients[-1])]),
        lambda: replace(last, gradients=[*last.gradients[:-1], without_one(last.gradients[-1])]),
    ]
    for make in worse:
        with pytest.raises(AssertionError):
            assert_equal([*ranks[:-1], make()], plain, "full_shard")


def nudged(tensors: Any) -> dict[str, Any]:
    name, value = next((n, t) for n, t in tensors.items() if t is not None and t.numel())
    moved = value.clone()
    moved.view(-1)[-1] = torch.nextafter(moved.view(-1)[-1], torch.tensor(9.0))
    return {**tensors, name: moved}


def without_one(gradients: Gradients) -> Gradients:
    return {**gradients, next(iter(gradients)): None}


def test_the_reference_itself_is_what_a_plain_loop_does() -> None:
    """At world 1 nothing is combined, so an ordinary loop must give the same."""
    recipe, model = RECIPE, RECIPE.model()
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    for step in range(recipe.steps):
        value = recipe.loss(model, recipe.batches(step, 0)[0])
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    reference = one_by_one(recipe, 1)
    assert reference.losses == [losses]
    assert differing(reference.states[0], model.state_dict()) == []


def test_the_mean_in_rank_order_is_spelt_out() -> None:
    """Rank order is visible in the bits: the reference must not sum in any other."""
    parts = [torch.tensor([1.0, 1e8]), torch.tensor([2.0, -1e8]), torch.tensor([3.0, 1.0])]
    mean = mean_in_rank_order([{"w": part, "b": None} for part in parts])
    assert mean["b"] is None
    assert torch.equal(mean["w"], torch.tensor([2.0, 1.0 / 3]))  # type: ignore[arg-type]
