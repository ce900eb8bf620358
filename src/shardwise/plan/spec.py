"""A bucket on paper: which parameters it holds, in which dtypes, and where each one lies.

Parameters that differ in stored dtype, compute dtype or trainability cannot share a flat
buffer, so a unit has one bucket for each combination. (FSDP1 refuses such units, FSDP2 sends
them as bytes.) Nothing here owns memory: ``parameters`` and ``gradients`` do, and both ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.codec import wire_nbytes
from shardwise.comm.grid import Axis, Grid
from shardwise.comm.reduction import Reduction
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.config.precision import Dtypes
from shardwise.config.prefetch import Prefetch
from shardwise.plan.layout.layout import Layout, Slot, chunk_rows
from shardwise.plan.layout.solver import solve
from shardwise.plan.schedule.events import Policy, UnitBytes
from shardwise.plan.units.units import Member, Unit
from shardwise.plan.views import Views

SMALL_GRADIENT = 1 << 14  # elements: below this a copy costs less than the call for it
LARGEST_KEPT = 1 << 17  # bytes of a mean whose memory is kept
LARGEST_EXCHANGED = 1 << 22  # bytes of which half a sum costs less than another collective


@dataclass(frozen=True)
class Allocation:
    """The place of a bucket's memory, as its mesh, placement and dtypes decide."""

    shared: bool  # the ranks that split it map one full bucket, so a gather moves nothing
    lasting: bool  # the full bucket keeps its memory when it is freed
    aliased: bool  # the shard is a slice of the full bucket, so a gather copies nothing
    whole: bool  # the shard is the whole bucket, so a gather sends nothing
    stays_whole: bool  # parameters show the same, whole memory all the time
    reloaded: bool  # the device keeps nothing of it between its uses


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """Numbers that both sides of a bucket, parameters and gradients, agree on."""

    unit: str  # its name
    members: tuple[Member, ...]  # its parameters, each with a slot of its first name in the layout
    layout: Layout  # who owns which range at rest
    dtypes: Dtypes
    reduction: Reduction  # how its gradients are averaged over all ranks
    shard: Axis  # of the ranks that split it
    replicate: Axis  # of the ranks that hold the same of it as this rank
    placement: Placement
    offload: str
    kept: bool = False  # is it frozen, and stays in memory as it was gathered first?

    @property
    def title(self) -> str:
        """The unit's name as it is shown."""
        return self.unit or "(root)"

    @cached_property
    def params(self) -> list[nn.Parameter]:
        return [member.param for member in self.members]

    @cached_property
    def trainable(self) -> bool:
        """``requires_grad`` as it was when the model was sharded; it may have changed since."""
        return self.params[0].requires_grad

    @cached_property
    def slots(self) -> list[Slot]:
        return [self.layout.by_name[member.name] for member in self.members]

    @cached_property
    def averages(self) -> list[tuple[Axis, Reduction]]:
        """The axes over which gradients are summed, one after the other, and how."""
        axes = [axis for axis in (self.shard, self.replicate) if axis.size > 1] or [self.shard]
        last = replace(self.reduction, whole=self.exchanges, in_place=self.in_place)
        if len(axes) == 1:
            return [(axes[0], last)]
        first, last = replace(self.reduction, after=1.0), replace(last, before=1.0)
        return list(zip(axes, (first, last), strict=True))

    @cached_property
    def exchanges(self) -> bool:
        """Do two copies send each other all their gradients, of which both take the mean?

        As many bytes as of half of them and then of half the mean, in one collective, and a sum
        that is twice as long.
        """
        dtypes, part = self.dtypes, self.layout.numel // self.shard.size
        is_narrow = dtypes.reduce.itemsize <= dtypes.stored.itemsize
        is_small = part * dtypes.stored.itemsize <= LARGEST_EXCHANGED
        pays = is_small or not self._has_one_dtype
        return self.copies == 2 and self.replicate.by_messages and is_narrow and pays

    @property
    def spreads(self) -> bool:
        """Do copies send each other the part of the mean that each of them has summed?"""
        return self.copies > 1 and not self.exchanges

    @property
    def in_place(self) -> bool:
        """Is the mean over the copies formed in the memory that is sent, and stays there?"""
        return self.spreads and self.replicate.by_messages and self._has_one_dtype

    @property
    def _has_one_dtype(self) -> bool:
        dtypes = self.dtypes
        return dtypes.reduce is dtypes.sum is dtypes.stored  # so nothing is quantised, either

    @cached_property
    def allocation(self) -> Allocation:
        same_dtype = self.dtypes.stored is self.dtypes.param
        shared, whole = self.shard.shared, self.layout.world == 1
        reloaded = self.offload == "everything" and not (shared or self.kept)
        kept_whole = self.placement.resident or (whole and (same_dtype or self.in_host))
        lasting = shared or self.kept or (kept_whole and not reloaded)
        aliased = lasting and same_dtype and not self.in_host
        return Allocation(shared, lasting, aliased, whole, aliased and whole, reloaded)

    @cached_property
    def in_host(self) -> bool:
        """Are its shard and gradients in host memory? Frozen ones no optimizer needs there."""
        return self.offload == "everything" or (self.offload == "optimizer" and self.trainable)

    @cached_property
    def staged(self) -> torch.dtype | None:
        """The dtype of the memory, beside the full bucket, in which what is sent is kept."""
        in_full = self.allocation.lasting or self.allocation.reloaded
        if in_full or not (self.splits_copies or self.in_host):
            return None  # what is sent is the shard, or made in the full bucket
        return self.dtypes.param

    @property
    def gather_sent(self) -> int:
        """Bytes that one rank sends when the bucket is gathered."""
        nbytes = self.layout.numel * self.dtypes.param.itemsize
        return 0 if self.shard.shared else _to_others(nbytes, self.shard)

    @property
    def update_sent(self) -> int:
        """Bytes that one rank sends when copies join their pieces."""
        part = self.layout.numel // self.shard.size * self.dtypes.param.itemsize
        return _to_others(part, self.replicate) if self.splits_copies else 0

    @property
    def reduce_sent(self) -> int:
        """Bytes that one rank sends when its gradients are reduced, over the first axis."""
        wire = wire_nbytes(self.dtypes.reduce, self.layout.numel, self.shard.size)
        return _to_others(wire, self.shard) if self.shard.size > 1 else self._over_copies

    @property
    def average_sent(self) -> int:
        """Bytes that one rank sends when sums over shards are averaged over the copies, too."""
        return self._over_copies if len(self.averages) > 1 else 0

    @property
    def _over_copies(self) -> int:
        wire, part = self.dtypes.reduce, self.layout.numel // self.shard.size
        over_copies = wire_nbytes(wire, part, self.replicate.size)
        if self.exchanges:
            return over_copies
        spread = part * self.dtypes.stored.itemsize if self.spreads else 0
        return _to_others(over_copies + spread, self.replicate)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges ``[start, stop)`` of the shard that this rank holds, one for each parameter."""
        return [self.layout.local_range(slot, self.position) for slot in self.slots]

    @cached_property
    def splits_copies(self) -> bool:
        """Is what this rank holds at rest a piece of its shard, and not all of that?"""
        return self.layout.world > self.shard.size

    @cached_property
    def copies(self) -> int:
        """The ranks that hold the same at rest."""
        return 1 if self.splits_copies else self.replicate.size

    @cached_property
    def position(self) -> int:
        """Index of the bucket's part that this rank holds while sharded, of ``layout.world``."""
        if self.splits_copies:
            return self.shard.rank * self.replicate.size + self.replicate.rank
        return self.shard.rank

    @cached_property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def rest_nbytes(self) -> int:
        """Bytes that this rank holds at rest, as stored."""
        return self.layout.shard_numel * self.dtypes.stored.itemsize

    @property
    def keeps_mean(self) -> bool:
        """Is the memory of the mean kept for the next step? Of a larger one it counts for more."""
        is_mean = len(self.averages) == 1 and self.dtypes.sum is self.dtypes.stored
        is_ours = self.shard.size > 1 and self.copies == 1 and not self.in_host
        return self.trainable and is_mean and is_ours and self.rest_nbytes <= LARGEST_KEPT

    @property
    def piece_numel(self) -> int:
        """Elements that one rank sums; a shard has a piece for each copy (see ``Mesh``)."""
        return self.layout.shard_numel // self.copies

    def summed_by(self, element: int) -> int:
        """The rank of the mesh that sums this element of the shard."""
        if self.copies == 1:
            return self.rank
        return element // self.piece_numel * self.shard.size + self.shard.rank

    def own(self, full: Tensor) -> Tensor:
        """``[W * S] → [S]``: what this rank holds at rest of a full bucket."""
        size = self.layout.shard_numel
        return full[self.position * size : (self.position + 1) * size]

    def sent(self, full: Tensor) -> Tensor:
        """Slice that this rank sends in a gather: its shard, all copies' pieces of it."""
        size = self.layout.numel // self.shard.size
        return full[self.shard.rank * size : (self.shard.rank + 1) * size]

    def piece(self, shard: Tensor) -> Tensor:
        """Slice of its shard that this rank holds while sharded."""
        size = self.layout.shard_numel
        first = self.position * size % shard.numel() if size else 0
        return shard[first : first + size]

    @cached_property
    def full_views(self) -> Views:
        """``[W * S] →`` each parameter, whole."""
        whole = [(slot.start, slot.stop, slot.shape) for slot in self.slots]
        return Views(whole, self.layout.numel)

    @cached_property
    def rest_views(self) -> Views:
        """``[S] →`` what this rank holds of each parameter."""
        shapes = (self.layout.shard_shape(slot, self.position) for slot in self.slots)
        pairs = zip(self.ranges, shapes, strict=True)
        return Views([(*range_, shape) for range_, shape in pairs], self.layout.shard_numel)


def _to_others(nbytes: int, ranks: Axis) -> int:
    """The bytes that one rank sends of ``nbytes``, of which it keeps its own piece."""
    return nbytes * (ranks.size - 1) // ranks.size


def bytes_of(specs: Sequence[BucketSpec], trained: Sequence[BucketSpec]) -> UnitBytes:
    """Bytes of a unit's buckets, and of the gradients of the trained ones; padding included."""
    gathered = sum(spec.layout.numel * spec.dtypes.param.itemsize for spec in specs)
    gradients = sum(spec.layout.numel * spec.dtypes.collected.itemsize for spec in trained)
    spread = sum(s.layout.numel * s.dtypes.stored.itemsize for s in trained if s.spreads)
    joined = sum(s.layout.numel * s.dtypes.param.itemsize for s in specs if s.splits_copies)
    gather_sent, update_sent = sum(s.gather_sent for s in specs), sum(s.update_sent for s in specs)
    over_both = sum(spec.reduce_sent for spec in trained), sum(s.average_sent for s in trained)
    sent = gather_sent, update_sent, *over_both
    loaded = sum(spec.rest_nbytes for spec in specs if spec.in_host)
    stored = sum(spec.rest_nbytes for spec in trained if spec.in_host)
    kept_sent = sum(spec.gather_sent for spec in specs if spec.kept and spec not in trained)
    return UnitBytes(gathered, gradients, spread, joined, *sent, loaded, stored, kept_sent)


def policy_of(specs: Sequence[BucketSpec], prefetch: Prefetch) -> Policy:
    """Return what the schedule of a model with these buckets depends on, besides its order."""
    casts = any(spec.dtypes.stored is not spec.dtypes.param for spec in specs)
    averages = frozenset(spec.unit for spec in specs if len(spec.averages) > 1)
    joins = frozenset(spec.unit for spec in specs if spec.splits_copies)
    return Policy(
        {spec.unit: spec.placement for spec in specs},
        prefetch,
        casts=casts,
        averages=averages,
        joins=joins,
        loads=frozenset(spec.unit for spec in specs if spec.in_host),
        reloads=frozenset(spec.unit for spec in specs if spec.allocation.reloaded),
    )


def specs_of(
    unit: Unit, options: Options, grid: Grid, placement: Placement, alignment: int
) -> list[BucketSpec]:
    """A unit's buckets, one for each combination of dtypes, trainability and ``bucketing``.

    Args:
        alignment: bytes at whose multiples a slot starts.
    """
    groups: dict[Any, list[Member]] = {}
    for member in unit.members:
        param = member.param
        keeps, trains = options.precision.keeps(member.name), param.requires_grad
        dtypes = options.precision.of(param.dtype, trains, keeps)
        parts = {"block": None, "layer": member.name.rpartition(".")[0], "none": member.name}
        part = parts[options.bucketing]
        groups.setdefault((dtypes, trains, part), []).append(member)
    return [
        BucketSpec(
            unit.name,
            tuple(members),
            _solve(members, dtypes, options, grid.size, alignment).over(
                # What is frozen has no optimizer state, and nothing to be joined in each step.
                grid.size if placement.splits_copies and trains else grid.shard.size
            ),
            dtypes,
            options.precision.reduction(dtypes, grid.size),
            *grid,
            placement,
            options.offload,
            placement.resident and not (trains or options.offload == "everything"),
        )
        for (dtypes, trains, _), members in groups.items()
    ]


def _solve(
    members: Sequence[Member], dtypes: Dtypes, options: Options, world: int, alignment: int
) -> Layout:
    """Places are the same for all meshes of as many ranks, so that sums are rounded alike."""
    atom = options.blocksize if members[0].param.requires_grad else 0
    slots = [Slot(member.name, tuple(member.shape), atom) for member in members]
    if options.bucketing == "none":
        return chunk_rows(slots[0], world, options.uneven)
    narrowest = min(d.itemsize for d in (dtypes.stored, dtypes.param, dtypes.collected))
    return _solved(tuple(slots), world, max(1, alignment // narrowest))


_solved = lru_cache(256)(solve)  # a plan cuts the same units for many candidates
