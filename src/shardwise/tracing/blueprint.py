"""What ``shard()`` would decide for a model, on paper: units, buckets, layouts and schedules.

The same functions decide as for a model that is sharded, so the two cannot drift apart. The model
is not touched and may be on the meta device; the ranks need not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.environment import local_size
from shardwise.comm.fake import FakeComm
from shardwise.comm.host_memory import HostMemory
from shardwise.comm.mesh import Mesh, Shape, shape_of
from shardwise.memory.residency import with_residency
from shardwise.memory.spec import BucketSpec, bytes_of, policy_of, specs_of
from shardwise.options import Options
from shardwise.printed import Schedule
from shardwise.schedule.events import Event, Mode, Order, Policy, Prefetch, UnitBytes, events
from shardwise.schedule.placement import Placement
from shardwise.strategies import placement_of
from shardwise.units.units import Units, choose_units
from shardwise.units.wrap import Wrap

__all__ = ["Blueprint", "draw", "mesh_of", "of_shape"]


def of_shape(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of this shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model as ``shard()`` would cut it for one rank.

    Attributes:
        units: which parameters are gathered together.
        specs: the buckets of each unit, by its name.
        placement: the strategy.
        policy: where each unit lives, prefetch, and whether a gather casts.
        rank, world: for which rank, of how many.
        shape: the grid of a hybrid strategy; otherwise ``None``.
        options: as for ``shard()``.
    """

    units: Units
    specs: Mapping[str, tuple[BucketSpec, ...]]
    placement: Placement
    policy: Policy
    rank: int
    world: int
    shape: Shape | None
    options: Options

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """Those of all units, in order."""
        return tuple(spec for specs in self.specs.values() for spec in specs)

    @property
    def device(self) -> torch.device:
        """Where the tensors would lie."""
        devices = (spec.shard.device for spec in self.buckets)
        return next(devices, torch.device("cpu"))

    def name_of(self, spec: BucketSpec) -> str:
        """The unit's name, with a number where it has several buckets: ``"blocks.0.1"``."""
        among, unit = self.specs[spec.unit], spec.unit or "root"
        return f"{unit}.{among.index(spec)}" if len(among) > 1 else unit

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter, in its shape and dtype, on the meta device."""
        return {
            slot.name: of_shape(spec.dtypes.stored, *spec.layout.shard_shape(slot, spec.position))
            for spec in self.buckets
            for slot in spec.slots
        }

    @property
    def nbytes(self) -> dict[str, UnitBytes]:
        """What each unit takes."""
        trained = {name: [s for s in specs if s.trainable] for name, specs in self.specs.items()}
        return {name: bytes_of(specs, trained[name]) for name, specs in self.specs.items()}

    def events(
        self, order: Order, prefetch: Prefetch | None = None, mode: Mode = "train"
    ) -> tuple[Event, ...]:
        """One training step; ``prefetch`` stands for that of the options."""
        policy = replace(self.policy.of_mode(mode), prefetch=prefetch or self.policy.prefetch)
        return events(order, policy, self.nbytes)

    def schedule(self, order: Order, mode: Mode = "train") -> Schedule:
        """One training step, to be printed."""
        shape = f" ({self.shape})" if self.shape else ""
        name = self.placement.name + shape + self.options.offload.words
        placements = dict.fromkeys(self.specs, self.placement)
        policy = replace(self.policy.of_mode(mode), placements=placements)
        plain = events(order, policy, self.nbytes)
        step = (self.events(order, mode=mode), self.nbytes, name, mode, self.world)
        return Schedule(*step, self.buckets, plain, self.options.buffers)


def mesh_of(strategy: str, mesh: tuple[int, int] | None) -> tuple[int, int] | None:
    """``mesh`` for a hybrid strategy; the others, which are compared with it, have one axis."""
    return mesh if placement_of(strategy).hybrid else None


def draw(
    model: nn.Module,
    strategy: str = "full_shard",
    wrap: Wrap | None = None,
    ranks: tuple[int, int] = (0, 2),
    **options: Any,
) -> Blueprint:
    """A blueprint of ``model`` for one rank.

    Args:
        model: any module; it stays as it is.
        strategy, wrap, options: as for ``shard()``.
        ranks: the rank, and how many there are.

    Raises:
        ConfigError: an argument that cannot work.
    """
    chosen, placement = Options(**options), placement_of(strategy)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    comm = FakeComm(*ranks, "cpu" if device.type == "meta" else device)
    chosen.precision.check(comm.device, model)
    shape = shape_of(placement, comm.size, chosen.mesh, local_size(os.environ))
    units, mesh = choose_units(model, wrap, chosen.ignored), Mesh.of(comm, placement.splits, shape)
    host = HostMemory(comm.device)
    cut = {unit.name: specs_of(unit, chosen, mesh, placement, host) for unit in units}
    kept = with_residency(cut, chosen.residency)
    specs = {name: tuple(of_unit) for name, of_unit in kept.items()}
    every = [spec for of_unit in specs.values() for spec in of_unit]
    policy = policy_of(every, chosen.prefetch)
    return Blueprint(units, specs, placement, policy, *ranks, shape, chosen)
