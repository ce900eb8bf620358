"""A grid of ranks in numbers: its shape, and one rank's place on each axis.

A plan needs no more of the ranks than this; ``mesh`` has their communicators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError


class Axis(NamedTuple):
    """One rank's place on an axis of a grid."""

    number: int  # of the axis in a ``Grid`` and a ``Mesh``
    rank: int
    size: int
    shared: bool = False  # do its ranks map one full bucket, so that a gather moves nothing?
    vendor: bool = False  # does a vendor's library sum over it?

    @property
    def by_messages(self) -> bool:
        """Do its ranks send each other messages, and sum what they receive?"""
        return not (self.shared or self.vendor)


class Grid(NamedTuple):
    """One rank's place in a grid of ranks; the axes are those of a ``Mesh``."""

    shard: Axis
    replicate: Axis

    @classmethod
    def of(cls, rank: int, world: int, splits: bool, shape: Shape | None = None) -> Grid:
        """The place of a rank of ``world``; the arguments are those of ``Mesh.of``."""
        shards = (shape.shard if shape else world) if splits else 1
        row, column = divmod(rank, shards)
        return cls(Axis(0, column, shards), Axis(1, row, world // shards))

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size


class Shape(NamedTuple):
    """A grid of ranks, numbered row by row: a row holds the model once."""

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        return self.replicate * self.shard

    def __str__(self) -> str:
        copies = " (one copy)" * (self.replicate == 1)
        return f"replicate={self.replicate}{copies} × shard={self.shard}"

    def draw(self) -> str:
        """The ranks as a grid, a row for each copy of the model."""
        width = len(str(self.size - 1))
        rows = [
            "".join(f"  {row * self.shard + column:>{width}}" for column in range(self.shard))
            for row in range(self.replicate)
        ]
        return "\n".join([str(self), *rows])


def shape_of(
    strategy: str, hybrid: bool, world: int, mesh: object, local_size: int | None
) -> Shape | None:
    """The grid of a hybrid strategy; ``None`` if the strategy has one axis.

    Args:
        strategy: the model's, for errors.
        hybrid: it uses two axes.
        mesh: ``(replicate, shard)``, or a ``DeviceMesh`` of two axes; else a row is a host.
        local_size: ranks on this host; ``None`` = unknown.

    Raises:
        ConfigError: its product is not ``world``, nothing says it, or the strategy has one axis.
    """
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        mesh = tuple(mesh.mesh.shape)
    axes = _axes(mesh) if isinstance(mesh, (tuple, list)) else None
    if not hybrid:
        if axes is not None:
            raise ConfigError(
                f"strategy {strategy!r} uses one axis, and the mesh has two, {axes}. Choose "
                'a hybrid, such as "hybrid_shard", or pass one axis of the mesh.'
            )
        return None
    if axes is not None:
        return _checked(Shape(*axes), world)
    local_size = 1 if world == 1 else local_size
    if local_size is None:
        raise ConfigError(
            f"strategy {strategy!r} needs a mesh of two axes, and LOCAL_WORLD_SIZE, which "
            f"says how many of the {world} ranks are on a host, is not set. Pass "
            f"mesh=(replicate, shard), such as mesh=(1, {world})."
        )
    if world % local_size:
        raise ConfigError(
            f"there are {world} ranks, and LOCAL_WORLD_SIZE={local_size} on this host; {world} is "
            f"no multiple of {local_size}, so not every host can have a copy. Start as many ranks "
            "on each host, or pass mesh=(replicate, shard)."
        )
    return Shape(world // local_size, local_size)


def _axes(sizes: Sequence[object]) -> tuple[int, int]:
    match sizes:
        case (int() as replicate, int() as shard):
            return replicate, shard
    raise ConfigError(
        f"mesh is {sizes}; it is two numbers of ranks, (replicate, shard), such as (2, 4). For one "
        "axis leave it out."
    )


def _checked(shape: Shape, world: int) -> Shape:
    if min(shape) < 1 or shape.size != world:
        raise ConfigError(
            f"the mesh is {shape}, for {shape.size} ranks, and there are {world}. Pass "
            "mesh=(replicate, shard) with that product, or leave mesh out: then the ranks of "
            "each host shard the model, and each host has a copy."
        )
    return shape
