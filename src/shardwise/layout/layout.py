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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm, prod
from string import ascii_lowercase
from typing import NamedTuple

from shardwise.errors import ConfigError, nearest

__all__ = ["Layout", "Slot", "chunk_rows", "solve"]

_Pieces = Sequence[tuple[int, int]]  # (size, grain) of each parameter: see "solving" below


@dataclass(frozen=True)
class Slot:
    """A parameter in a bucket: elements ``[start, stop)``, ``numel`` of them.

    Attributes:
        name, shape: the whole parameter's.
        atom: elements that are never split between ranks (a quantisation block), counted from its
            first. 0 lets ``solve`` choose: a dim-0 ``row``, or 1 where that costs too much.
        start: its place, once ``solve`` has chosen one.
    """

    name: str
    shape: tuple[int, ...]
    atom: int = 0
    start: int = 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def row(self) -> int:
        """Elements of one dim-0 row; 1 for a scalar, and where rows have no elements."""
        return max(1, prod(self.shape[1:]))

    @property
    def keeps_rows(self) -> bool:
        """Whether every rank's part is a whole number of dim-0 rows."""
        return self.atom % self.row == 0


@dataclass(frozen=True)
class Layout:
    """One bucket, cut into ``world`` shards of ``shard_numel`` elements. Printing it draws it.

    Rank ``r`` stores elements ``[r * shard_numel, (r + 1) * shard_numel)`` of the full bucket,
    which has ``numel``: ``used`` by the slots, which are in order of place, the rest ``padding``.
    """

    slots: tuple[Slot, ...]
    world: int
    shard_numel: int

    @property
    def numel(self) -> int:
        return self.shard_numel * self.world

    @cached_property
    def used(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        return self.numel - self.used

    def slot(self, name: str) -> Slot:
        """The slot of that name; if there is none, ConfigError with the nearest names."""
        if name not in self._by_name:
            like = nearest(name, self._by_name)
            raise ConfigError(f"no slot of this bucket is named {name!r}; the nearest are {like}")
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
        A scalar is ``()`` on its owner and ``(0,)`` elsewhere: no 0-dim tensor is empty, and an
        element on each rank would count W times in a norm. Optimizers and ``.grad`` take both,
        and ``ndim >= 2`` is false of both. What has no elements keeps its shape everywhere.
        """
        lo, hi = self.owned(slot, rank)
        if slot.numel == 0:
            return slot.shape
        if not slot.shape:
            return () if lo < hi else (0,)
        if slot.keeps_rows:
            return ((hi - lo) // slot.row, *slot.shape[1:])
        return (hi - lo, *(1 for _ in slot.shape[1:]))

    def over(self, world: int) -> Layout:
        """The same places in ``world`` larger shards; ``self.world`` is a multiple of that.

        Rows that were given up are kept again where no boundary falls into them any more.
        """
        size, slots = self.numel // world, list[Slot]()
        for slot in self.slots:
            wanted = replace(slot, atom=0) if slot.atom == 1 else slot
            slots.append(_placed(wanted, slot.start, max(1, size)))
        return Layout(tuple(slots), world, size)

    def __str__(self) -> str:
        return "\n".join([_title(self), *_table(self), *_drawing(self)])


def chunk_rows(slot: Slot, world: int, uneven: str = "pad") -> Layout:
    """A bucket of one parameter, cut on dim 0 as ``torch.chunk`` and FSDP2 do; a scalar is a row.

    Given atoms make chunks larger rather than be cut. Rows that do not divide by the world size
    are padded, or are a ConfigError if ``uneven`` is ``"error"`` and not ``"pad"``.
    """
    _check([slot], world)
    rows = slot.shape[0] if slot.shape else 1
    if uneven not in ("pad", "error"):
        raise ConfigError(f"uneven is 'pad' or 'error', not {uneven!r}")
    if uneven == "error" and rows % world:
        raise ConfigError(
            f"Current sharding requires the first dimension of the parameter {slot.name!r} "
            f"({rows}) to be divisible by the world size ({world})"
        )
    slot = replace(slot, atom=_atom(slot))
    return Layout((slot,), world, _up(slot.numel, lcm(slot.row, slot.atom) * world) // world)


def solve(wanted: Sequence[Slot], world: int, align: int = 16, slack: int = 32) -> Layout:
    """The bucket of these parameters with the smallest shards found, the same on every rank.

    Boundaries between ranks fall on atoms of the slot they lie in. Where padding would exceed
    both 2% of the used elements and ``slack`` per rank, row atoms are given up, on slots with the
    fewest elements, until it does not. (Thousands of scalars cost more by their aligned starts
    alone; the bound is then on what is added.) Given atoms stay, whatever they cost. Up to eight
    parameters get the best of all orders, more a greedy one, and model order where it is as good.

    Args:
        wanted: the parameters in model order; a name that occurs twice is a ConfigError.
        world: ranks that share the bucket.
        align: elements; the shard size and the start of each slot are multiples of it.
        slack: elements of padding per rank that are always accepted: 32 are 128 bytes of fp32.
    """
    _check(wanted, world, align)
    weights = [slot.numel for slot in wanted]
    if not any(weights):
        return Layout(tuple(_placed(slot, 0, 1) for slot in wanted), world, 0)
    grains = [_atom(slot) // gcd(_atom(slot), align) for slot in wanted]
    pieces = [(-(-weight // align), grain) for weight, grain in zip(weights, grains, strict=True)]
    soft = frozenset(i for i, slot in enumerate(wanted) if not slot.atom and grains[i] > 1)
    low, high = -(-sum(size for size, _ in pieces) // world), 0
    for elements in (sum(weights), sum(size for size, _ in pieces) * align):
        if high < low:
            high = (elements + max(elements // 50, slack * world)) // (world * align)
    while not (way := _search(_Problem(pieces, weights, soft, world), low, max(low, high))):
        low, high = high + 1, high + 1 + high // 16  # given atoms may need more
    size, places = way.shard * align, (start * align for start in way.starts)
    slots = (_placed(slot, place, size) for slot, place in zip(wanted, places, strict=True))
    return Layout(tuple(sorted(slots, key=lambda slot: (slot.start, slot.stop))), world, size)


def _check(slots: Sequence[Slot], world: int, align: int = 1) -> None:
    if min(world, align, *(slot.atom or 1 for slot in slots)) < 1:
        raise ConfigError(f"world ({world}), align ({align}) and atoms must be at least 1")
    for name, count in Counter(slot.name for slot in slots).items():
        if count > 1:
            fact = f"{count} parameters of one bucket are named {name!r}, so that name finds none"
            raise ConfigError(f"{fact}: rename them, or pass a tied parameter only once")


def _placed(slot: Slot, start: int, shard: int) -> Slot:
    """The slot at ``start``; it keeps its atom unless a boundary falls inside one."""
    atom, stop = _atom(slot), start + slot.numel
    whole = all((cut - start) % atom == 0 for cut in range(_up(start + 1, shard), stop, shard))
    return replace(slot, start=start, atom=atom if whole else 1)


def _atom(slot: Slot) -> int:
    return slot.atom or slot.row


def _up(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number``."""
    return -(-number // step) * step


def _clip(number: int, top: int) -> int:
    return min(max(number, 0), top)


# --- solving --------------------------------------------------------------------------------------
# From here on lengths are in steps of `align` elements, and a parameter is a piece: a *size* and
# a *grain*. A boundary inside it must lie a multiple of the grain from its start; to give up its
# rows is to set the grain to 1. In a line with a boundary every `shard` steps, a piece with
#   no boundary inside      can lie anywhere
#   one boundary inside     starts up to `grain - 1` steps later, so that the boundary suits it
#   two or more             needs a shard size that is a multiple of its grain


def _fits(size: int, grain: int, shard: int) -> bool:
    """Whether the line has any place for the piece."""
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
    gone: frozenset[int]  # the pieces they belong to
    starts: list[int]


@dataclass
class _Problem:
    pieces: _Pieces  # in model order
    weights: list[int]  # elements of each
    soft: frozenset[int]  # those that have rows to give up
    world: int
    effort: int = 100_000  # places yet to be tried: bounds the time, equally on every rank

    def way(self, shard: int, gone: frozenset[int]) -> _Way | None:
        """A way with these rows given up, if one is found before the effort is spent."""
        pieces = [(size, 1 if i in gone else g) for i, (size, g) in enumerate(self.pieces)]
        if self.effort <= 0 or not all(_fits(*piece, shard) for piece in pieces):
            return None
        self.effort -= len(pieces)
        starts, end = _walk(range(len(pieces)), pieces, shard)
        if end > shard * self.world:
            search = _best_order if len(pieces) <= 8 else _greedy_order
            starts, end = _walk(search(pieces, shard), pieces, shard)
        lost = sum(self.weights[i] for i in gone)
        return _Way(lost, shard, gone, starts) if end <= shard * self.world else None


def _shards(problem: _Problem, low: int, high: int) -> list[int]:
    """Shard sizes worth trying: multiples of what the grains of most elements have in common."""

    def widen(step: int, grain: int) -> int:
        return lcm(step, grain) if _up(low, lcm(step, grain)) <= high else step

    weight: Counter[int] = Counter()
    for (_, grain), elements in zip(problem.pieces, problem.weights, strict=True):
        weight[grain] += elements
    heavy = sorted(weight, key=lambda grain: (-weight[grain], grain))
    given = {grain for i, (_, grain) in enumerate(problem.pieces) if i not in problem.soft}
    first = sorted(heavy, key=lambda grain: grain not in given)
    steps = {*accumulate(heavy, widen, initial=1), *accumulate(first, widen, initial=1)}
    some = (range(_up(low, s), high + 1, s * max(1, (high - low) // (16 * s))) for s in steps)
    return sorted({shard for shards in some for shard in shards})


def _search(problem: _Problem, low: int, high: int) -> _Way | None:
    """The fewest elements lost, then the smallest shards, within ``[low, high]``."""
    soft, sizes = problem.soft, _shards(problem, low, high)
    must = {n: frozenset(i for i in soft if not _fits(*problem.pieces[i], n)) for n in sizes}
    lost = {shard: sum(problem.weights[i] for i in gone) for shard, gone in must.items()}
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
            way = way and (problem.way(shard, way.gone - {i}) or way)
        best = min(best, way or best)
    return best


def _title(layout: Layout) -> str:
    share = f"{layout.padding / max(1, layout.used):.2%}"
    text = f"{layout.world} shards of {layout.shard_numel}, padding {layout.padding} ({share})"
    row = layout.slots[0].row if len(layout.slots) == 1 else 0
    if not row or not layout.padding or layout.numel % row:
        return text
    return f"{text}: padded {layout.used // row}→{layout.numel // row} rows on dim 0"


def _table(layout: Layout) -> list[str]:
    lines = [("", "slot", "shape", "place", "atom", "ranks", "rows on each")]
    for k, slot in enumerate(layout.slots):
        ranks, unit = layout.owners(slot), slot.row if slot.keeps_rows else 1
        span = f"{ranks[0]}–{ranks[-1]}" if ranks else "none"
        owned = (layout.owned(slot, rank) for rank in ranks[:8])
        rows = ", ".join([str((hi - lo) // unit) for lo, hi in owned] + ["…"] * (len(ranks) > 8))
        rows += "" if slot.keeps_rows else " elements"
        numbers = (str(slot.shape), f"{slot.start}–{slot.stop}", str(slot.atom), span)
        lines.append((ascii_lowercase[k : k + 1], slot.name, *numbers, rows))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _drawing(layout: Layout) -> list[str]:
    """The bucket element by element, where that can be taken in at a glance."""
    if not 0 < layout.numel <= 48 or len(layout.slots) > 26:
        return []
    cells = ["·"] * layout.numel
    for mark, slot in zip(ascii_lowercase, layout.slots, strict=False):
        cells[slot.start : slot.stop] = [f"{mark}{k}" for k in range(slot.numel)]
    wide, n = max(map(len, cells)), layout.shard_numel
    below = [" ".join(f"{c:{wide}}" for c in cells[k : k + n]) for k in range(0, layout.numel, n)]
    above = [f"rank {rank}".ljust(len(text)) for rank, text in enumerate(below)]
    return [" | ".join(above).rstrip(), " | ".join(below).rstrip()]
