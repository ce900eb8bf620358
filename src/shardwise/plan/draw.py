"""A model as ``shard()`` would cut it: a blueprint for ranks that need not exist.

The model is not touched and may be on the meta device.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.grid import Grid, shape_of
from shardwise.comm.machine.environment import local_size
from shardwise.config.options import Options
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.blueprint import Blueprint, draw_on, units_of
from shardwise.plan.residency import joined_trained
from shardwise.plan.spec import BucketSpec
from shardwise.plan.units.wrap import Wrap


def of_shape(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of this shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def name_of(blueprint: Blueprint, spec: BucketSpec) -> str:
    """The unit's name, with a number where it has several buckets: ``"blocks.0.1"``."""
    among, unit = blueprint.specs[spec.unit], spec.unit or "root"
    return f"{unit}.{among.index(spec)}" if len(among) > 1 else unit


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
    rank, world = ranks
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world}: ranks are numbered from 0 to {world - 1}.")
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    chosen.precision.check(device, model)
    name, hybrid = placement.name, placement.hybrid
    shape = shape_of(name, hybrid, world, chosen.mesh, local_size(os.environ))
    grid = Grid.of(rank, world, placement.splits, shape)
    joined = joined_trained(model, placement, grid, chosen)
    return draw_on(grid, device, units_of(model, wrap, chosen, joined), placement, chosen)
