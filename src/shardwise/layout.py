"""Where each parameter lies in its bucket, and which rank owns which part of it. Pure numbers.

A bucket is one flat buffer cut into equal shards, so the gather's output *is* the parameters'
storage. The ordinary way cuts every parameter on dim 0 and pads each to the world size, which
sends and keeps up to 8 times the bytes; cutting the flat buffer blindly pads nothing, but cuts
through rows. Here slots are ordered, and padded *between* each other, so that the cuts fall
between rows; where that would cost too much, rows are given up, slot by slot.

    rank 0            | rank 1
    a0 a1 a2 a3 a4 a5 | a6 a7 a8 b0 b1  ·        a: 3 rows of 3    b: 2 rows of 1    · padding
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import gcd, lcm, prod
from string import ascii_lowercase
from typing import NamedTuple

from shardwise.errors import ConfigError, nearest

__all__ = ["Layout", "Slot", "Spec", "chunk_rows", "solve"]


@dataclass(frozen=True)
class Spec:
    """A parameter that wants a place in a bucket.

    Attributes:
        name: unique in its bucket.
        shape: the whole parameter's shape; ``()`` for a scalar.
        atom: elements that are never split (a quantisation block), counted from the parameter's
            first. None asks for one dim-0 row, and lets ``solve`` give that up.
    """

    name: str
    shape: tuple[int, ...]
    atom: int | None = None


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket.

    Attributes:
        name: as in its ``Spec``.
        shape: as in its ``Spec``.
        start: offset of the first element in the full bucket, in elements.
        atom: ranks share the slot in runs of this many elements: the dim-0 row, the atom that
            was given, or 1 where rows were given up ("element atoms").
    """

    name: str
    shape: tuple[int, ...]
    start: int
    atom: int

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """Offset behind the last element."""
        return self.start + self.numel

    @property
    def row(self) -> int:
        """Elements of one dim-0 row; 1 for a scalar, and for rows without elements."""
        return max(1, prod(self.shape[1:]))

    @property
    def keeps_rows(self) -> bool:
        """Whether every rank's part is a whole number of dim-0 rows."""
        return self.atom % self.row == 0


@dataclass(frozen=True)
class Layout:
    """One bucket, cut into ``world`` shards of ``shard_numel`` elements. Printing it draws it.

    Rank ``r`` stores elements ``[r * shard_numel, (r + 1) * shard_numel)`` of the full bucket.
    The slots are in order of place.
    """

    slots: tuple[Slot, ...]
    world: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the full bucket, padding included."""
        return self.shard_numel * self.world

    @cached_property
    def used(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Elements that belong to nothing, and are gathered and kept all the same."""
        return self.numel - self.used

    def slot(self, name: str) -> Slot:
        """The slot of that name.

        Raises:
            ConfigError: there is none; the message has the nearest names.
        """
        if name not in self._by_name:
            like = ", ".join(nearest(name, self._by_name)) or "none, for the bucket is empty"
            raise ConfigError(f"no slot of this bucket is named {name!r}; the nearest are: {like}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def owners(self, slot: Slot) -> range:
        """The ranks that store at least one element of the slot."""
        if slot.numel == 0:
            return range(0)
        return range(slot.start // self.shard_numel, (slot.stop - 1) // self.shard_numel + 1)

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """``[lo, hi)`` inside the slot, in elements, that the rank stores; ``lo == hi`` if none."""
        first = rank * self.shard_numel - slot.start
        return _clip(first, slot.numel), _clip(first + self.shard_numel, slot.numel)

    def local_range(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The same elements as offsets inside the rank's shard, in ``[0, shard_numel]``."""
        first = slot.start - rank * self.shard_numel
        return _clip(first, self.shard_numel), _clip(first + slot.numel, self.shard_numel)

    def shard_shape(self, slot: Slot, rank: int) -> tuple[int, ...]:
        """The shape of the rank's part; it has the parameter's ``ndim``, scalars excepted.

        Rows kept: ``(k, *rest)``, where ``k`` may be 0. Element atoms: ``(n, 1, …, 1)``, so that
        a rule such as "decay what has two dimensions" holds on shards as it does on parameters.

        A scalar is ``()`` on its owner and ``(0,)`` elsewhere. No 0-dim tensor is empty, and a
        real element on every rank would count W times in a norm. ``.grad`` takes the same shape,
        optimizers step an empty tensor for nothing, and ``ndim >= 2`` is false of both.

        A parameter without elements keeps its shape on every rank: there is nothing to split.
        """
        lo, hi = self.owned(slot, rank)
        if slot.numel == 0:
            return slot.shape
        if not slot.shape:
            return () if lo < hi else (0,)
        if slot.keeps_rows:
            return ((hi - lo) // slot.row, *slot.shape[1:])
        return (hi - lo, *(1 for _ in slot.shape[1:]))

    def __str__(self) -> str:
        return "\n".join([_summary(self), *_table(self), *_drawing(self)])


def chunk_rows(spec: Spec, world: int, uneven: str = "pad") -> Layout:
    """A bucket of one parameter, cut on dim 0 as ``torch.chunk`` and FSDP2 do.

    Each rank holds ``ceil(rows / world)`` rows, the last ranks fewer or none. A scalar is one row.
    A given atom that would be cut makes the chunks larger.

    Args:
        spec: the parameter.
        world: ranks that share it.
        uneven: ``"pad"``, or ``"error"`` if rows that do not divide are not to be padded.

    Raises:
        ConfigError: the rows do not divide and ``uneven`` is ``"error"``; or a senseless argument.
    """
    _check([spec], {"world": world})
    if uneven not in ("pad", "error"):
        raise ConfigError(f"uneven is 'pad' or 'error', not {uneven!r}")
    rows = spec.shape[0] if spec.shape else 1
    if uneven == "error" and rows % world:
        raise ConfigError(
            f"Current sharding requires the first dimension of the parameter {spec.name!r} "
            f"({rows}) to be divisible by the world size ({world})"
        )
    slot = Slot(spec.name, spec.shape, 0, _atom(spec))
    step = lcm(slot.row, slot.atom)
    return Layout((slot,), world, _up(slot.numel, step * world) // world)


def solve(specs: Sequence[Spec], world: int, align: int = 16, slack: int = 32) -> Layout:
    """The bucket of these parameters with the smallest shards found, the same on every rank.

    Boundaries between ranks fall on atoms of the slot they lie in. Where padding would exceed
    both 2% of the used elements and ``slack`` per rank, row atoms are given up, on slots with the
    fewest elements, until it does not; so no shard is larger than ``max(1.02 * mean, mean +
    slack)``, where ``mean`` is the used elements per rank. (If aligned starts alone cost more, as
    for thousands of scalars, ``mean`` counts them.) Given atoms are never given up, and may cost
    more. Up to eight slots are laid out by trying every order, more by a greedy rule.
    Model order is kept where that costs nothing.

    Args:
        specs: the parameters in model order, names unique.
        world: ranks that share the bucket.
        align: elements; the shard size and the start of each slot are multiples of it.
        slack: elements of padding per rank that are always accepted: 32 are 128 bytes of fp32.

    Raises:
        ConfigError: a name occurs twice, or an argument makes no sense.
    """
    _check(specs, {"world": world, "align": align})
    problem = _Problem.of(specs, world, align)
    low, high = _least(problem), 0
    for elements in (sum(problem.weights), sum(problem.sizes) * align):
        if high < low:
            high = (elements + max(elements // 50, slack * world)) // (world * align)
    found = _search(problem, low, max(low, high))
    shard = found.shard * align
    slots = [_cut(s, at * align, shard) for s, at in zip(specs, found.starts, strict=True)]
    return Layout(tuple(sorted(slots, key=lambda s: (s.start, s.stop))), world, shard)


def _check(specs: Sequence[Spec], positive: dict[str, int]) -> None:
    for word, number in positive.items():
        if number < 1:
            raise ConfigError(f"{word} must be at least 1, not {number}")
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise ConfigError(
                f"{count} parameters of one bucket are named {name!r}, so the name finds none "
                "of them; give each its own (tied parameters are one slot)"
            )
    for spec in specs:
        if min(spec.shape, default=0) < 0 or (spec.atom is not None and spec.atom < 1):
            raise ConfigError(f"{spec}: sizes are at least 0 and an atom at least 1")


def _cut(spec: Spec, start: int, shard: int) -> Slot:
    """The slot at ``start``; it keeps its atoms unless a boundary falls inside one."""
    atom = _atom(spec)
    stop = start + prod(spec.shape)
    whole = all((cut - start) % atom == 0 for cut in range(_up(start + 1, shard), stop, shard))
    return Slot(spec.name, spec.shape, start, atom if whole else 1)


def _atom(spec: Spec) -> int:
    return spec.atom or max(1, prod(spec.shape[1:]))


def _up(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number``."""
    return -(-number // step) * step


def _clip(number: int, top: int) -> int:
    return min(max(number, 0), top)


# --- solving --------------------------------------------------------------------------------------
#
# From here on lengths are in steps of `align` elements, and a parameter is a *size* and a
# *grain*: a boundary inside it must lie a multiple of the grain from its start. To give up its
# rows is to set the grain to 1. In a line with a boundary every `shard` steps, a parameter with
#
#   no boundary inside      can lie anywhere
#   one boundary inside     starts up to `grain - 1` steps later, so that the boundary suits it
#   two or more             needs a shard size that is a multiple of its grain


def _fits(size: int, grain: int, shard: int) -> bool:
    """Whether the line has any place for the parameter."""
    if size <= shard or shard % grain == 0:
        return True
    return size <= shard + shard // grain * grain


def _gap(at: int, size: int, grain: int, shard: int) -> int:
    """Steps to leave empty if a parameter that fits comes next, at ``at``."""
    ahead = shard - at % shard  # to the next boundary
    if size <= ahead:
        return 0
    gap = ahead % grain
    if size <= shard or shard % grain == 0 or (gap < ahead and size <= ahead - gap + shard):
        return gap
    return ahead + shard % grain  # two boundaries would lie inside: go beyond the first


@dataclass(frozen=True)
class _Line:
    """Parameters in model order, and the line on which each is to get a place."""

    sizes: Sequence[int]
    grains: Sequence[int]
    shard: int
    world: int

    def place(self) -> list[int] | None:
        """A start for each parameter, or None if no order was found that ends on the line."""
        if not all(
            _fits(*piece, self.shard) for piece in zip(self.sizes, self.grains, strict=True)
        ):
            return None
        search = self.best_order if len(self.sizes) <= 8 else self.gap_filling_order
        for order in (lambda: range(len(self.sizes)), search):
            starts, end = self.walk(order())
            if end <= self.shard * self.world:
                return starts
        return None

    def walk(self, order: Iterable[int]) -> tuple[list[int], int]:
        """Starts (in model order) and end, if placed one after the other in this order."""
        starts, at = [0] * len(self.sizes), 0
        for i in order:
            starts[i] = at + _gap(at, self.sizes[i], self.grains[i], self.shard)
            at = starts[i] + self.sizes[i]
        return starts, at

    def best_order(self) -> Iterable[int]:
        """The order that ends first. Of the orders of a subset, only the first to end matters."""
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # subset → end, order
        everything = (1 << len(self.sizes)) - 1
        for subset in range(everything):
            at, order = best[subset]
            for i, (size, grain) in enumerate(zip(self.sizes, self.grains, strict=True)):
                if not subset >> i & 1:
                    way = (at + _gap(at, size, grain, self.shard) + size, (*order, i))
                    best[subset | 1 << i] = min(way, best.get(subset | 1 << i, way))
        return best[everything][1]

    def gap_filling_order(self) -> Iterable[int]:
        """The stiffest first; before each, the largest that fill the gap that it would leave.

        What stays of a gap is padding, while padding is used up no faster than the line itself.
        Beyond that, a parameter with grain 1 is laid across the boundary.
        """
        sizes, grains, n = self.sizes, self.grains, len(self.sizes)
        room = self.shard * self.world
        spare = room - sum(sizes)
        left = sorted((size, i) for i, size in enumerate(sizes))
        soft = [(size, i) for size, i in left if grains[i] == 1]
        order: list[int] = []
        at = padded = 0
        queue = sorted(range(n), key=lambda i: (min(grains[i], sizes[i]), sizes[i], -i))
        placed = [False] * n
        while queue and padded <= spare:
            i = queue[-1]
            if placed[i]:
                queue.pop()
                continue
            ahead = self.shard - at % self.shard
            gap = min(_gap(at, sizes[i], grains[i], self.shard), ahead)
            if gap:
                fillers, across = bisect_right(left, (gap, n)), bisect_right(soft, (ahead, n))
                if fillers:
                    i = left[fillers - 1][1]
                elif (padded + gap) * room > spare * (at + gap) and across < len(soft):
                    i = soft[across][1]
                else:
                    at, padded = at + gap, padded + gap
                    continue
            order.append(i)
            placed[i] = True
            at += sizes[i]
            for pool in (left, soft) if grains[i] == 1 else (left,):
                del pool[bisect_left(pool, (sizes[i], i))]
        return order if not queue else range(n)


class _Found(NamedTuple):
    """A solution. The fewest elements lost come first, then the smallest shards."""

    lost: int  # elements whose rows are given up
    shard: int
    gone: frozenset[int]  # the parameters they belong to
    starts: list[int]

    @property
    def cost(self) -> tuple[int, int]:
        return self.lost, self.shard


@dataclass
class _Problem:
    """One bucket to solve. The lists are per parameter, in model order."""

    sizes: list[int]
    grains: list[int]
    given: list[bool]  # the atom was given, so the grain stays
    weights: list[int]  # elements
    world: int
    effort: int = 100_000  # placements yet to try: bounds the time, equally on every rank

    @classmethod
    def of(cls, specs: Sequence[Spec], world: int, align: int) -> _Problem:
        weights = [prod(spec.shape) for spec in specs]
        return cls(
            sizes=[-(-weight // align) for weight in weights],
            grains=[_atom(spec) // gcd(_atom(spec), align) for spec in specs],
            given=[spec.atom is not None for spec in specs],
            weights=weights,
            world=world,
        )

    @cached_property
    def soft(self) -> frozenset[int]:
        """The parameters whose rows can be given up."""
        return frozenset(i for i, g in enumerate(self.grains) if g > 1 and not self.given[i])

    def misfits(self, shard: int) -> frozenset[int]:
        """Those that no line of this shard size has a place for, unless cut through rows."""
        return frozenset(i for i in self.soft if not _fits(self.sizes[i], self.grains[i], shard))

    def lost(self, gone: Iterable[int]) -> int:
        return sum(self.weights[i] for i in gone)

    def place(self, shard: int, gone: frozenset[int]) -> list[int] | None:
        grains = [1 if i in gone else grain for i, grain in enumerate(self.grains)]
        return _Line(self.sizes, grains, shard, self.world).place()

    def attempt(self, shard: int, gone: frozenset[int]) -> _Found | None:
        """The same as a solution, as long as effort is left."""
        self.effort -= len(self.sizes)
        starts = self.place(shard, gone) if self.effort >= 0 else None
        return None if starts is None else _Found(self.lost(gone), shard, gone, starts)


def _least(problem: _Problem) -> int:
    """The least shard size found that keeps the given atoms; without them, the mean."""
    mean = -(-sum(problem.sizes) // problem.world)
    longest: dict[int, int] = {1: 0}  # given grain → size of the largest such parameter
    for size, grain, given in zip(problem.sizes, problem.grains, problem.given, strict=True):
        longest[grain] = max(longest.get(grain, 0), size if given else 0)
    best, common = sum(problem.sizes), 1
    # The longest may need to be cut often, and so a multiple of their grains; the others lie
    # in one shard or two. Try each way to draw the line between them.
    for grain in sorted(longest, key=lambda g: (-longest[g], g)):
        shard = _up(max(mean, longest[grain] // 2), common)
        while shard < best and problem.place(shard, problem.soft) is None:
            shard += common * max(1, shard // (256 * common))
        best = min(best, shard)
        common = lcm(common, grain)
    return best


def _shards(problem: _Problem, low: int, high: int) -> list[int]:
    """Shard sizes worth trying: multiples of what the grains of most elements have in common."""
    weight: Counter[int] = Counter()
    for grain, elements in zip(problem.grains, problem.weights, strict=True):
        weight[grain] += elements
    grains = sorted(weight, key=lambda grain: (-weight[grain], grain))[:24]
    given = (g for g, given in zip(problem.grains, problem.given, strict=True) if given)
    base = lcm(*(grain for grain in given if low % grain == 0))
    steps = {base}
    for first in grains[:8]:
        step = base
        for grain in (first, *grains):
            wider = lcm(step, grain)
            step = wider if _up(low, wider) <= high else step
            steps.add(step)
    some = (range(_up(low, s), high + 1, s * max(1, (high - low) // (16 * s))) for s in steps)
    return sorted({shard for shards in some for shard in shards})


def _search(problem: _Problem, low: int, high: int) -> _Found:
    """The least rows given up, then the smallest shards, within ``[low, high]``."""
    # 0. Without any rows the least shard size is sure to do.
    starts = problem.place(low, problem.soft)
    assert starts is not None
    best = _Found(problem.lost(problem.soft), low, problem.soft, starts)
    shards = {shard: problem.misfits(shard) for shard in _shards(problem, low, high)}
    cost = {shard: problem.lost(gone) for shard, gone in shards.items()}
    # 1. Give up only what fits nowhere. The first that can be placed is the best of these.
    for shard in sorted(shards, key=lambda shard: (cost[shard], shard)):
        if found := problem.attempt(shard, shards[shard]):
            best = min(best, found, key=lambda found: found.cost)
            break
    # 2. Where that promised less but could not be placed, give up a few more: there is most room
    #    in the largest shards.
    for shard in sorted(shards, key=lambda shard: (cost[shard], -shard))[:4]:
        if cost[shard] < best.lost and (found := _give_up(problem, shard, shards[shard])):
            best = min(best, found, key=lambda found: found.cost)
    # 3. With these rows given up, less room may do.
    smaller = (problem.attempt(shard, best.gone) for shard in shards if shard < best.shard)
    return next((found for found in smaller if found), best)


def _give_up(problem: _Problem, shard: int, gone: frozenset[int]) -> _Found | None:
    """Give up rows beyond ``gone``, as few as can be found, until all can be placed."""
    order = sorted(problem.soft - gone, key=lambda i: (problem.weights[i], i))
    found = problem.attempt(shard, problem.soft)
    # 1. the smallest first, by bisection
    low, high = 0, len(order)
    while found and low < high:
        middle = (low + high) // 2
        fewer = problem.attempt(shard, gone.union(order[:middle]))
        found, low, high = (fewer, low, middle) if fewer else (found, middle + 1, high)
    # 2. take back the largest, in halves, where they turn out not to be needed
    groups = [order[:high]]
    while found and groups:
        group = groups.pop()
        fewer = problem.attempt(shard, found.gone.difference(group))
        if fewer:
            found = fewer
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return found


# --- drawing --------------------------------------------------------------------------------------

_MARKS = ascii_lowercase  # a slot's letter in the drawing


def _summary(layout: Layout) -> str:
    share = layout.padding / max(1, layout.used)
    text = (
        f"{layout.numel} elements: {layout.world} shards of {layout.shard_numel}, "
        f"{layout.padding} padding ({share:.2%} of those used)"
    )
    if len(layout.slots) == 1 and layout.padding and layout.slots[0].shape:
        slot = layout.slots[0]
        if layout.shard_numel % slot.row == 0:
            text += f"; padded {slot.shape[0]}→{layout.numel // slot.row} rows on dim 0"
    return text


def _table(layout: Layout) -> list[str]:
    lines = [("", "slot", "shape", "place", "atom", "ranks", "rows on each")]
    for k, slot in enumerate(layout.slots):
        mark = _MARKS[k] if len(layout.slots) <= len(_MARKS) else ""
        ranks = layout.owners(slot)
        told = f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}" if ranks else "none"
        place = f"{slot.start}–{slot.stop}"
        parts = _parts(layout, slot)
        lines.append((mark, slot.name, str(slot.shape), place, str(slot.atom), told, parts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _parts(layout: Layout, slot: Slot) -> str:
    """What each owner holds, equal neighbours together: ``3 × 171, 170``."""
    owned = (layout.owned(slot, rank) for rank in layout.owners(slot))
    unit = slot.row if slot.keeps_rows else 1
    runs = [(part, len(list(run))) for part, run in groupby((hi - lo) // unit for lo, hi in owned)]
    told = [f"{count} × {part}" if count > 1 else f"{part}" for part, count in runs[:6]]
    return ", ".join(told + ["…"] * (len(runs) > 6)) + ("" if slot.keeps_rows else " elements")


def _drawing(layout: Layout) -> list[str]:
    """The bucket element by element, where that can be taken in at a glance."""
    if not 0 < layout.numel <= 48 or len(layout.slots) > len(_MARKS):
        return []
    cells = ["·"] * layout.numel
    for mark, slot in zip(_MARKS, layout.slots, strict=False):
        cells[slot.start : slot.stop] = [f"{mark}{k}" for k in range(slot.numel)]
    width, n = max(map(len, cells)), layout.shard_numel
    rows = [[cell.ljust(width) for cell in cells[k : k + n]] for k in range(0, layout.numel, n)]
    ranks = [(f"rank {rank}", " ".join(row)) for rank, row in enumerate(rows)]
    return [
        " | ".join(text.ljust(len(ranks[0][1])) for text in line).rstrip() for line in zip(*ranks)
    ]
