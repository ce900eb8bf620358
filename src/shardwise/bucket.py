"""A bucket on paper: which parameters it holds, in which dtypes, and where each one lies.

Parameters that differ in stored dtype, compute dtype or trainability cannot share a flat
buffer, so a unit has one bucket for each combination. (FSDP1 refuses such units, FSDP2 sends
them as bytes.) Nothing here owns memory: ``buffers`` and ``gradients`` do, and both ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import accelerators, layout
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Comm
from shardwise.comm.reduction import Reduction
from shardwise.cuts import Cuts, Place
from shardwise.layout import Layout, Slot
from shardwise.options import Options
from shardwise.precision import Dtypes
from shardwise.sharding import Sharding
from shardwise.strategies import Placement
from shardwise.units import Member, Unit

__all__ = ["BucketSpec", "specs_of"]


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """What both sides of a bucket, parameters and gradients, agree on.

    Attributes:
        unit: the unit's name.
        members: its parameters, each with a slot of its first name in ``layout``.
        layout: who owns which range, over the ranks that split it.
        dtypes: stored, compute, wire and sum.
        reduction: how its gradients are averaged over all ranks.
        mesh: the ranks that split it, and those that hold copies.
        placement: where parameters live at rest.
    """

    unit: str
    members: tuple[Member, ...]
    layout: Layout
    dtypes: Dtypes
    reduction: Reduction
    mesh: Mesh
    placement: Placement

    @cached_property
    def params(self) -> list[nn.Parameter]:
        return [member.param for member in self.members]

    @cached_property
    def trainable(self) -> bool:
        """As it was when the model was sharded; ``requires_grad`` may have changed since."""
        return self.params[0].requires_grad

    @cached_property
    def slots(self) -> list[Slot]:
        return [self.layout.slot(member.name) for member in self.members]

    @cached_property
    def shard(self) -> Comm:
        """The ranks that split it."""
        return self.mesh.shard

    @cached_property
    def replicate(self) -> Comm:
        """The ranks that hold the same of it as this rank."""
        return self.mesh.replicate

    @cached_property
    def averages(self) -> list[tuple[Comm, Reduction]]:
        """The axes over which gradients are summed, one after the other, and how."""
        axes = [comm for comm in (self.shard, self.replicate) if comm.size > 1] or [self.shard]
        if len(axes) == 1:
            return [(axes[0], self.reduction)]
        first, last = replace(self.reduction, after=1.0), replace(self.reduction, before=1.0)
        return list(zip(axes, (first, last), strict=True))

    @property
    def whole_at_rest(self) -> bool:
        """Does this rank hold all of every parameter between steps?"""
        return self.shard.size == 1

    @property
    def piece_numel(self) -> int:
        """Elements of which one rank alone forms the sum; a shard has a piece for each copy."""
        return self.layout.numel // self.mesh.size

    def own(self, full: Tensor) -> Tensor:
        """``[W * S] → [S]``: this rank's shard of a full bucket."""
        size = self.layout.shard_numel
        return full[self.shard.rank * size : (self.shard.rank + 1) * size]

    def full_views(self, full: Tensor) -> list[Tensor]:
        """``[W * S] →`` each parameter, whole."""
        return self._whole_cuts.views(full)

    def rest_views(self, flat: Tensor) -> list[Tensor]:
        """``[S] →`` what this rank holds of each."""
        return self._rest_cuts.views(flat)

    @cached_property
    def _whole_cuts(self) -> Cuts:
        places = [Place(slot.start, slot.stop, slot.shape) for slot in self.slots]
        return Cuts(places, self.layout.numel)

    @cached_property
    def _rest_cuts(self) -> Cuts:
        rank, layout = self.shard.rank, self.layout
        places = [
            Place(*layout.local_range(slot, rank), layout.shard_shape(slot, rank))
            for slot in self.slots
        ]
        return Cuts(places, layout.shard_numel)

    @cached_property
    def pieces(self) -> list[list[tuple[int, int, int]]]:
        """Of each parameter's shard: which rank sums its elements ``[start, stop)``."""
        copies, size = self.replicate.size, self.piece_numel
        numbers = range(self.shard.rank * copies, (self.shard.rank + 1) * copies)
        pieces = [(self.mesh.rank_of(k), k * size, k * size + size) for k in numbers]
        shards = [(s.start, *self.layout.owned(s, self.shard.rank)) for s in self.slots]
        return [
            [
                (rank, max(begin - at, start) - start, min(end - at, stop) - start)
                for rank, begin, end in pieces
                if max(begin - at, start) < min(end - at, stop)
            ]
            for at, start, stop in shards
        ]

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges of a full bucket that belong to no parameter."""
        return self._whole_cuts.gaps

    def sharding(self, index: int) -> Sharding:
        """Where parameter ``index``'s elements are."""
        slot = self.slots[index]
        start, stop = self.layout.owned(slot, self.shard.rank)
        placement = "fully_sharded" if self.placement.splits else "replicated"
        shape = torch.Size(slot.shape)
        return Sharding(
            slot.name, self.unit, placement, shape, start, stop, slot.atom, self.layout, self.shard
        )


def specs_of(unit: Unit, options: Options, mesh: Mesh, placement: Placement) -> list[BucketSpec]:
    """A unit's buckets, one for each combination of dtypes, trainability and ``bucketing``."""
    groups: dict[Any, list[Member]] = {}
    for member in unit.members:
        param = member.param
        dtypes = options.precision.of(param.dtype, param.requires_grad)
        part = {
            "block": None,
            "layer": member.name.rpartition(".")[0],
            "none": member.name,
        }[options.bucketing]
        groups.setdefault((dtypes, param.requires_grad, part), []).append(member)
    return [
        BucketSpec(
            unit.name,
            tuple(members),
            _solve(members, dtypes, options, mesh),
            dtypes,
            options.precision.reduction(dtypes, mesh.size),
            mesh,
            placement,
        )
        for (dtypes, _, _), members in groups.items()
    ]


def _solve(members: Sequence[Member], dtypes: Dtypes, options: Options, mesh: Mesh) -> Layout:
    """Places are the same for all meshes of as many ranks, so that sums are rounded alike."""
    specs = [layout.Spec(member.name, tuple(member.shape)) for member in members]
    if options.bucketing == "none":
        return layout.chunk_rows(specs[0], mesh.size, options.uneven).over(mesh.shard.size)
    narrowest = min(d.itemsize for d in (dtypes.stored, dtypes.compute, dtypes.wire))
    alignment = accelerators.row(mesh.shard.device.type).alignment
    pieces = layout.solve(specs, mesh.size, max(1, alignment // narrowest))
    return pieces.over(mesh.shard.size)
