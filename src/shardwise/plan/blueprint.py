"""The decisions of ``shard()`` for a model, on paper: units, buckets, layouts and schedules.

``shard()`` builds what is drawn here; a plan or a trace only draws it (``plan.draw``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.comm.grid import Grid, Shape
from shardwise.comm.machine.accelerators import row
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.plan.printed import Schedule
from shardwise.plan.residency import with_residency
from shardwise.plan.schedule.decide import events
from shardwise.plan.schedule.events import Mode, Order, Policy, UnitBytes
from shardwise.plan.spec import BucketSpec, bytes_of, policy_of, specs_of
from shardwise.plan.units.units import Units, choose_units
from shardwise.plan.units.wrap import Wrap, automatic


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model as ``shard()`` cuts it for one rank."""

    units: Units
    specs: Mapping[str, tuple[BucketSpec, ...]]  # of each unit's buckets, by its name
    placement: Placement
    policy: Policy  # where each unit lives, prefetch, and whether a gather casts
    grid: Grid  # the place of the rank among all
    device: torch.device  # on which it computes
    options: Options  # those of ``shard()``

    @property
    def shape(self) -> Shape | None:
        """The shape of the grid of a hybrid strategy; otherwise ``None``."""
        shape = Shape(self.grid.replicate.size, self.grid.shard.size)
        return shape if self.placement.hybrid else None

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """Buckets of all units, in order."""
        return tuple(spec for specs in self.specs.values() for spec in specs)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Return what this rank holds of each parameter: shape and dtype, on the meta device."""
        return {
            slot.name: torch.empty(shape, dtype=spec.dtypes.stored, device="meta")
            for spec in self.buckets
            for slot in spec.slots
            for shape in [spec.layout.shard_shape(slot, spec.position)]
        }

    @cached_property
    def nbytes(self) -> dict[str, UnitBytes]:
        """Bytes of each unit."""
        return {u: bytes_of(b, [s for s in b if s.trainable]) for u, b in self.specs.items()}

    def schedule(
        self, order: Order, mode: Mode = "train", nbytes: Mapping[str, UnitBytes] | None = None
    ) -> Schedule:
        """One training step, to be printed; ``nbytes``: of what is trained now."""
        shape = f" ({self.shape})" if self.shape else ""
        name = self.placement.name + shape + self.options.offload_words
        nbytes = nbytes or self.nbytes
        policy = replace(self.policy, placements=dict.fromkeys(self.specs, self.placement))
        plain = events(order, policy, nbytes, mode)
        step = (events(order, self.policy, nbytes, mode), nbytes, name, mode, self.grid)
        return Schedule(*step, self.buckets, plain, self.options.buffers)


def units_of(model: nn.Module, wrap: Wrap | None, options: Options, joined: int) -> Units:
    """The units of ``model``; arguments are those of ``shard()``, and ``joined_trained()``."""
    wrap = wrap or automatic()
    if options.compile or options.activation_checkpointing:  # which is done block by block
        wrap = replace(wrap, joined_nbytes=0)
    return choose_units(model, wrap, options.ignored, joined)


def draw_on(
    grid: Grid, device: torch.device, units: Units, placement: Placement, options: Options
) -> Blueprint:
    """A blueprint for one rank of a model with these units."""
    vendor, alignment = device.type != "cpu", row(device).alignment
    grid = Grid(*(axis._replace(vendor=axis.vendor or vendor) for axis in grid))
    cut = {unit.name: specs_of(unit, options, grid, placement, alignment) for unit in units}
    stay = with_residency(cut, units, options.unsharded)
    specs = {name: tuple(each) for name, each in stay.items()}
    policy = policy_of([spec for each in specs.values() for spec in each], options.prefetch)
    return Blueprint(units, specs, placement, policy, grid, device, options)
