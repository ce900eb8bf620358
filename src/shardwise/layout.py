"""Where each parameter lies in its bucket, and which rank owns which part of it. Pure numbers.

A bucket is one flat buffer cut into ``world`` equal shards, so the gather's output *is* the
parameters' storage. The ordinary way cuts every parameter on dim 0 and pads each one to the world
size, which sends and keeps up to 8 times the bytes; cutting the flat buffer blindly pads nothing,
but cuts through rows. Here slots are ordered and padded *between* each other, so that the cuts
fall between rows, and where that would cost too much, rows are given up slot by slot.

    rank 0               | rank 1
    a0 a1 a2 a3 a4 a5 ·  | a6 a7 a8 b0 b1 b2 ·        a: 3 rows of 3    b: 3 rows of 1    · padding
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import ceil, lcm, prod

from shardwise.errors import ConfigError, nearest

__all__ = ["Layout", "Slot", "Spec", "chunk_rows", "solve"]


@dataclass(frozen=True)
class Spec:
    """A parameter that wants a place in a bucket.

    Attributes:
        name: unique in its bucket.
        shape: the whole parameter's shape; ``()`` for a scalar.
        atom: elements that are never split (a quantisation block), counted from the parameter's
            first element. None asks for one dim-0 row, and lets ``solve`` give that up.
    """

    name: str
    shape: tuple[int, ...]
    atom: int | None = None


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket.

    Attributes:
        name, shape: as in its ``Spec``.
        start: offset of the first element in the full bucket, in elements.
        atom: no rank boundary falls inside a run of this many elements: the dim-0 row, the atom
            that was asked for, or 1 where rows were given up ("element atoms").
    """

    name: str
    shape: tuple[int, ...]
    start: int
    atom: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def row(self) -> int:
        """Elements of one dim-0 row; 1 for a scalar and for rows without elements."""
        return max(1, prod(self.shape[1:]))

    @property
    def keeps_rows(self) -> bool:
        """Whether every rank's part is a whole number of dim-0 rows."""
        return self.atom % self.row == 0


@dataclass(frozen=True)
class Layout:
    """One bucket: slots in order of place, cut into ``world`` shards of ``shard_numel`` elements.

    Rank ``r`` stores elements ``[r * shard_numel, (r + 1) * shard_numel)`` of the full bucket.
    ``print(layout)`` draws it.
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
        return self.numel - self.used

    def slot(self, name: str) -> Slot:
        """The slot of that name. Raises ConfigError, with the nearest names, if there is none."""
        if name not in self._by_name:
            known = ", ".join(nearest(name, self._by_name)) or "none, the bucket is empty"
            raise ConfigError(f"no slot is named {name!r} in this bucket; nearest: {known}")
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
        """The same elements as offsets into the rank's shard, within ``[0, shard_numel]``."""
        first = slot.start - rank * self.shard_numel
        return _clip(first, self.shard_numel), _clip(first + slot.numel, self.shard_numel)

    def shard_shape(self, slot: Slot, rank: int) -> tuple[int, ...]:
        """The shape of the rank's part, with the parameter's ``ndim`` (one exception, below).

        Rows are kept: ``(k, *rest)``, where ``k`` may be 0. Element atoms: ``(n, 1, ..., 1)``,
        so that rules such as "decay only what has two dimensions" hold on shards too.
        A scalar is ``()`` on its owner and ``(0,)`` elsewhere: no 0-dim tensor is empty, and a
        copy on every rank would be counted W times by norms and stepped W times by optimizers.
        Optimizers and ``.grad`` accept ``(0,)``, and rules on ``ndim >= 1`` or ``>= 2`` that
        are meant for weights should be asked before sharding, where every rank sees ``()``.
        A parameter without elements keeps its shape everywhere: there is nothing to split.
        """
        lo, hi = self.owned(slot, rank)
        if slot.numel == 0:
            return slot.shape
        if not slot.shape:
            return () if hi > lo else (0,)
        if slot.keeps_rows:
            return ((hi - lo) // slot.row, *slot.shape[1:])
        return (hi - lo, *(1 for _ in slot.shape[1:]))

    def __str__(self) -> str:
        return "\n".join([*_table(self), _totals(self), *_drawing(self)])


# --- deciding -------------------------------------------------------------------------------------


def chunk_rows(spec: Spec, world: int, uneven: str = "pad") -> Layout:
    """A bucket for one parameter, cut on dim 0 as ``torch.chunk`` and FSDP2 do.

    Every rank holds ``ceil(rows / world)`` rows, the last ranks fewer or none. A given atom that
    does not divide the rows makes the chunks larger, so that none is cut. A scalar is one row.

    Args:
        uneven: what to do when the rows do not divide by the world size, ``"pad"`` or ``"error"``.

    Raises:
        ConfigError: the rows do not divide and ``uneven="error"``.
    """
    _check([spec], world, align=1)
    if uneven not in ("pad", "error"):
        raise ConfigError(f"uneven is 'pad' or 'error', not {uneven!r}")
    slot = _slot(spec, 0)
    rows = spec.shape[0] if spec.shape else 1
    if uneven == "error" and rows % world:
        raise ConfigError(
            "Current sharding requires the first dimension of the parameter "
            f"{spec.name!r} ({rows}) to be divisible by the world size ({world})"
        )
    step = lcm(slot.row, slot.atom)
    return Layout((slot,), world, _up(slot.numel, step * world) // world)


def solve(specs: Sequence[Spec], world: int, align: int = 16, slack: int = 32) -> Layout:
    """The layout of one bucket, with the smallest shards found.

    Every boundary between two ranks falls on an atom boundary of the slot it lies in. If that
    cannot be had with padding of at most 2% of the used elements, or ``slack`` per rank, row atoms
    are given up on slots with the fewest elements until it can. Where aligned starts alone cost
    more (thousands of scalars), the bound holds for what is added to them. An atom that was given
    is never given up, and may cost more. Model order is kept where that costs nothing.
    The same arguments give the same layout on every rank.

    Args:
        specs: the parameters, in model order, names unique.
        world: ranks that share the bucket.
        align: elements; the shard size and every slot's start are multiples of it.
        slack: elements of padding per rank that are always accepted; 32 are 128 bytes of fp32.

    Raises:
        ConfigError: a name occurs twice, or a number makes no sense.
    """
    _check(specs, world, align)
    pieces = _Pieces.of(specs, align)
    low = _least(pieces, world)
    allowed = _allowed(sum(pieces.weights), sum(pieces.sizes) * align, world * slack)
    shard, grains, starts = _search(pieces, world, low, max(low, allowed // (world * align)))
    places = [start * align for start in starts]
    slots = [
        _slot(spec, place, world_cut=shard * align)
        for spec, place in zip(specs, places, strict=True)
    ]
    return Layout(tuple(sorted(slots, key=lambda slot: (slot.start, slot.stop))), world, shard)
