"""Finds the order and the padding of a bucket's slots that make its shards small. Pure numbers.

Lengths are in steps of `align` elements, and a parameter is a piece: a *size* and a *grain*. A
boundary inside it must lie a multiple of the grain from its start; to give up its rows is to set
the grain to 1. In a line with a boundary every `shard` steps, a piece with

    no boundary inside      can lie anywhere
    one boundary inside     starts up to `grain - 1` steps later, so that the boundary suits it
    two or more             needs a shard size that is a multiple of its grain
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, lcm
from typing import NamedTuple

from shardwise.plan.layout.layout import Layout, Slot, up

_Pieces = Sequence[tuple[int, int]]  # (size, grain) of each parameter


def solve(wanted: Sequence[Slot], world: int, align: int = 16, slack: int = 32) -> Layout:
    """The bucket of these parameters with the smallest shards found, the same on every rank.

    Boundaries between ranks fall on atoms of the slot they lie in. Where padding would exceed
    both 2% of the used elements and ``slack`` per rank, row atoms are given up, on slots with the
    fewest elements, until it does not. (Thousands of scalars cost more by their aligned starts
    alone; the bound is then on what is added.) Given atoms stay, whatever they cost. Up to eight
    parameters get the best of all orders, more a greedy one, and model order where it is as good.

    Args:
        wanted: the parameters in model order.
        world: ranks that share the bucket.
        align: elements; the shard size and the start of each slot are multiples of it.
        slack: elements of padding per rank that are always accepted: 32 are 128 bytes of fp32.
    """
    weights = [slot.numel for slot in wanted]
    if not any(weights):
        return Layout(tuple(replace(slot, atom=slot.asked_atom) for slot in wanted), world, 0)
    grains = [slot.asked_atom // gcd(slot.asked_atom, align) for slot in wanted]
    pieces = [(-(-weight // align), grain) for weight, grain in zip(weights, grains, strict=True)]
    soft = frozenset(i for i, slot in enumerate(wanted) if not slot.atom and grains[i] > 1)
    low, high = -(-sum(size for size, _ in pieces) // world), 0
    for elements in (sum(weights), sum(size for size, _ in pieces) * align):
        if high < low:
            high = (elements + max(elements // 50, slack * world)) // (world * align)
    while not (way := _search(_Problem(pieces, weights, soft, world), low, max(low, high))):
        low, high = high + 1, high + 1 + high // 16  # given atoms may need more
    size, places = way.shard * align, (start * align for start in way.starts)
    slots = (slot.placed(place, size) for slot, place in zip(wanted, places, strict=True))
    return Layout(tuple(sorted(slots, key=lambda slot: (slot.start, slot.stop))), world, size)


def _fits(size: int, grain: int, shard: int) -> bool:
    """Test that the line has any place for the piece."""
    return shard % grain == 0 or size <= shard + shard // grain * grain


def _gap(at: int, size: int, grain: int, shard: int) -> int:
    """Steps to leave empty if a piece that fits comes next, at ``at``."""
    ahead = shard - at % shard  # to the next boundary
    if size <= ahead:
        return 0
    gap = ahead % grain
    if size <= shard or shard % grain == 0 or size <= ahead - gap + shard:
        return gap
    return ahead + shard % grain  # two boundaries would lie inside: go beyond the first


def _walk(order: Iterable[int], pieces: _Pieces, shard: int) -> tuple[list[int], int]:
    """Starts (by piece) and end, if placed one after the other in this order."""
    starts, at = [0] * len(pieces), 0
    for i in order:
        starts[i] = at + _gap(at, *pieces[i], shard)
        at = starts[i] + pieces[i][0]
    return starts, at


def _best_order(pieces: _Pieces, shard: int) -> Sequence[int]:
    """The order that ends first. Of the orders of a subset, only the first to end matters."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # subset, as bits → end, order
    for subset in range((1 << len(pieces)) - 1):
        at, order = best[subset]
        for i, piece in enumerate(pieces):
            if not subset >> i & 1:
                way = (at + _gap(at, *piece, shard) + piece[0], (*order, i))
                best[subset | 1 << i] = min(way, best.get(subset | 1 << i, way))
    return best[(1 << len(pieces)) - 1][1]


def _greedy_order(pieces: _Pieces, shard: int) -> Iterable[int]:
    """The stiffest first; into the gap before each, the largest that fit there."""
    left = sorted((size, i) for i, (size, _) in enumerate(pieces))  # what has no place yet
    stiffness = [(min(grain, size), size, -i) for i, (size, grain) in enumerate(pieces)]
    order: dict[int, None] = {}
    at = 0
    for i in sorted(range(len(pieces)), key=stiffness.__getitem__, reverse=True):
        while i not in order:
            gap = min(_gap(at, *pieces[i], shard), shard - at % shard)
            fillers = bisect_right(left, (gap, len(pieces))) if gap else 0
            if gap and not fillers:  # it stays empty
                at += gap
                continue
            chosen = left[fillers - 1][1] if gap else i
            del left[bisect_left(left, (pieces[chosen][0], chosen))]
            order[chosen] = None
            at += pieces[chosen][0]
    return order


class _Way(NamedTuple):
    """A way to lay the bucket out. The fewest elements lost are best, then the smallest shards."""

    lost: int  # elements whose rows are given up
    shard: int
    given_up: frozenset[int]  # the pieces they belong to
    starts: list[int]


@dataclass
class _Problem:
    pieces: _Pieces  # in model order
    weights: list[int]  # elements of each
    soft: frozenset[int]  # those that have rows to give up
    world: int
    effort: int = 100_000  # places yet to be tried: bounds the time, equally on every rank

    def way(self, shard: int, given_up: frozenset[int]) -> _Way | None:
        """A way with these rows given up, if one is found before the effort is spent."""
        pieces = [(size, 1 if i in given_up else g) for i, (size, g) in enumerate(self.pieces)]
        if self.effort <= 0 or not all(_fits(*piece, shard) for piece in pieces):
            return None
        self.effort -= len(pieces)
        starts, end = _walk(range(len(pieces)), pieces, shard)
        if end > shard * self.world:
            search = _best_order if len(pieces) <= 8 else _greedy_order
            starts, end = _walk(search(pieces, shard), pieces, shard)
        lost = sum(self.weights[i] for i in given_up)
        return _Way(lost, shard, given_up, starts) if end <= shard * self.world else None


def _shards(problem: _Problem, low: int, high: int) -> list[int]:
    """Shard sizes worth trying: multiples of what the grains of most elements have in common."""

    def widen(step: int, grain: int) -> int:
        return lcm(step, grain) if up(low, lcm(step, grain)) <= high else step

    weight: Counter[int] = Counter()
    for (_, grain), elements in zip(problem.pieces, problem.weights, strict=True):
        weight[grain] += elements
    heavy = sorted(weight, key=lambda grain: (-weight[grain], grain))
    given = {grain for i, (_, grain) in enumerate(problem.pieces) if i not in problem.soft}
    first = sorted(heavy, key=lambda grain: grain not in given)
    steps = {*accumulate(heavy, widen, initial=1), *accumulate(first, widen, initial=1)}
    some = (range(up(low, s), high + 1, s * max(1, (high - low) // (16 * s))) for s in steps)
    return sorted({shard for shards in some for shard in shards})


def _search(problem: _Problem, low: int, high: int) -> _Way | None:
    """The fewest elements lost, then the smallest shards, within ``[low, high]``."""
    soft, sizes = problem.soft, _shards(problem, low, high)
    must = {n: frozenset(i for i in soft if not _fits(*problem.pieces[i], n)) for n in sizes}
    lost = {shard: sum(problem.weights[i] for i in given_up) for shard, given_up in must.items()}
    # 1. Give up all rows; or only where they fit nowhere, and the first way is the best of these.
    everything = (problem.way(shard, soft) for shard in sizes)
    as_needed = (problem.way(shard, must[shard]) for shard in sorted(sizes, key=lost.__getitem__))
    ways = [way for some in (everything, as_needed) if (way := next(filter(None, some), None))]
    if not ways:
        return None
    best = min(ways)
    # 2. Where this promised less, but found no way: all rows; then take back the largest that go.
    for shard in sorted(sizes, key=lambda shard: (lost[shard], -shard))[:4]:
        way = problem.way(shard, soft) if lost[shard] < best.lost else None
        for i in sorted(soft - must[shard], key=lambda i: (-problem.weights[i], i)):
            way = way and (problem.way(shard, way.given_up - {i}) or way)
        best = min(best, way or best)
    return best
