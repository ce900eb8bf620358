"""The place of each parameter in its bucket, and the rank that owns each part of it. Pure numbers.

A bucket is one flat buffer cut into equal shards, so the gather's output *is* the parameters'
storage. The ordinary way cuts every parameter on dim 0 and pads each to the world size, which
sends and keeps up to 8 times the bytes; cutting the flat buffer blindly pads nothing, but cuts
through rows. Here slots are ordered, and padded *between* each other, so that the cuts fall
between rows (see ``solver``); where that would cost too much, rows are given up, slot by slot.

    rank 0            | rank 1
    a0 a1 a2 a3 a4 a5 | a6 a7 a8 b0 b1  ·        a: 3 rows of 3    b: 2 rows of 1    · padding
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from string import ascii_lowercase

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """A parameter in a bucket: elements ``[start, stop)``, ``numel`` of them.

    An ``atom`` is the number of elements that are never split between ranks (a quantisation
    block). 0 lets ``solve`` choose: a dim-0 ``row``, or 1 where that costs too much.
    """

    name: str
    shape: tuple[int, ...]  # the whole parameter's
    atom: int = 0
    start: int = 0  # its place, once ``solve`` has chosen one

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
        """Test that every rank's part is a whole number of dim-0 rows."""
        return self.atom % self.row == 0

    @property
    def asked_atom(self) -> int:
        """The given atom, or else a row."""
        return self.atom or self.row

    def placed(self, start: int, shard: int) -> Slot:
        """The slot at ``start``; it keeps its atom unless a boundary falls inside one."""
        atom, cuts = self.asked_atom, range(up(start + 1, shard), start + self.numel, shard)
        whole = all((cut - start) % atom == 0 for cut in cuts)
        return replace(self, start=start, atom=atom if whole else 1)


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

    @cached_property
    def by_name(self) -> dict[str, Slot]:
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
        if slot.keeps_rows or hi - lo == slot.numel:
            return ((hi - lo) // slot.row, *slot.shape[1:])
        return (hi - lo, *(1 for _ in slot.shape[1:]))

    def over(self, world: int) -> Layout:
        """The same places in ``world`` larger shards; ``self.world`` is a multiple of that.

        Rows that were given up are kept again where no boundary falls into them any more.
        """
        size = self.numel // world
        wanted = (replace(slot, atom=0) if slot.atom == 1 else slot for slot in self.slots)
        slots = (slot.placed(slot.start, max(1, size)) for slot in wanted)
        return Layout(tuple(slots), world, size)

    def __str__(self) -> str:
        return "\n".join([_title(self), *_table(self), *_drawing(self)])


def chunk_rows(slot: Slot, world: int, uneven: str = "pad") -> Layout:
    """A bucket of one parameter, cut on dim 0 as ``torch.chunk`` and FSDP2 do; a scalar is a row.

    Given atoms make chunks larger rather than be cut. Rows that do not divide by the world size
    are padded, or are a ConfigError if ``uneven`` is ``"error"`` and not ``"pad"``.
    """
    rows = slot.shape[0] if slot.shape else 1
    if uneven == "error" and rows % world:
        raise ConfigError(
            f"Current sharding requires the first dimension of the parameter {slot.name!r} "
            f"({rows}) to be divisible by the world size ({world})"
        )
    slot = replace(slot, atom=slot.asked_atom)
    return Layout((slot,), world, up(slot.numel, lcm(slot.row, slot.atom) * world) // world)


def up(number: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``number``."""
    return -(-number // step) * step


def cut_at_multiples(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)``, cut at the multiples of ``size``."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


def _clip(number: int, top: int) -> int:
    return min(max(number, 0), top)


def _title(layout: Layout) -> str:
    text = f"{layout.world} shard{'s' * (layout.world != 1)} of {layout.shard_numel}, "
    text += f"padding {layout.padding} ({layout.padding / max(1, layout.used):.2%})"
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
