"""A bucket on paper: which parameters it holds, in which dtypes, and where each one lies.

Parameters that differ in stored dtype, compute dtype or trainability cannot share a flat
buffer, so a unit has one bucket for each combination. (FSDP1 refuses such units, FSDP2 sends
them as bytes.) Nothing here owns memory: ``buffers`` and ``gradients`` do, and both ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import accelerators, layout
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
        layout: who owns which range.
        dtypes: stored, compute, wire and sum.
        reduction: how its gradients are averaged.
        comm: the ranks that split it.
        placement: where parameters live at rest.
    """

    unit: str
    members: tuple[Member, ...]
    layout: Layout
    dtypes: Dtypes
    reduction: Reduction
    comm: Comm
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

    @property
    def whole_at_rest(self) -> bool:
        """Does this rank hold all of every parameter between steps?"""
        return not self.placement.splits or self.comm.size == 1

    def own(self, full: Tensor) -> Tensor:
        """``[W * S] → [S]``: this rank's piece of a full bucket."""
        size = self.layout.shard_numel
        return full[self.comm.rank * size : (self.comm.rank + 1) * size]

    def full_views(self, full: Tensor) -> list[Tensor]:
        """``[W * S] →`` each parameter, whole."""
        return self._whole_cuts.views(full)

    def rest_views(self, flat: Tensor) -> list[Tensor]:
        """``[S]`` (``[W * S]`` when nothing is split) ``→`` what this rank holds of each."""
        return (self._rest_cuts if self.placement.splits else self._whole_cuts).views(flat)

    @cached_property
    def _whole_cuts(self) -> Cuts:
        places = [Place(slot.start, slot.stop, slot.shape) for slot in self.slots]
        return Cuts(places, self.layout.numel)

    @cached_property
    def _rest_cuts(self) -> Cuts:
        rank, layout = self.comm.rank, self.layout
        places = [
            Place(*layout.local_range(slot, rank), layout.shard_shape(slot, rank))
            for slot in self.slots
        ]
        return Cuts(places, layout.shard_numel)

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges of a full bucket that belong to no parameter."""
        return self._whole_cuts.gaps

    def sharding(self, index: int) -> Sharding:
        """Where parameter ``index``'s elements are."""
        slot, split = self.slots[index], self.placement.splits
        start, stop = self.layout.owned(slot, self.comm.rank) if split else (0, slot.numel)
        placement = "fully_sharded" if split else "replicated"
        shape = torch.Size(slot.shape)
        return Sharding(
            slot.name, self.unit, placement, shape, start, stop, slot.atom, self.layout, self.comm
        )


def specs_of(unit: Unit, options: Options, comm: Comm, placement: Placement) -> list[BucketSpec]:
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
            _solve(members, dtypes, options, comm),
            dtypes,
            options.precision.reduction(dtypes, comm.size),
            comm,
            placement,
        )
        for (dtypes, _, _), members in groups.items()
    ]


def _solve(members: Sequence[Member], dtypes: Dtypes, options: Options, comm: Comm) -> Layout:
    specs = [layout.Spec(member.name, tuple(member.shape)) for member in members]
    if options.bucketing == "none":
        return layout.chunk_rows(specs[0], comm.size, options.uneven)
    narrowest = min(d.itemsize for d in (dtypes.stored, dtypes.compute, dtypes.wire))
    alignment = accelerators.row(comm.device.type).alignment
    return layout.solve(specs, comm.size, max(1, alignment // narrowest))
