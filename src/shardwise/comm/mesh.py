"""The axes of a group: parameters are sharded over one and replicated over the other.

Of four ranks, 0 and 1 shard the parameters, and 2 and 3 have copies:

    shard ──▶           ranks  0  1     A shard has one piece for each copy. Each rank that has it
    replicate           below  2  3     sums one piece, and sends that to the others.
        │
        ▼               bucket  | piece 0  piece 1 | piece 2  piece 3 |
                        held by | ranks 0 and 2    | ranks 1 and 3    |

With ``full_shard`` there is one copy, and a piece is a shard. With ``no_shard`` there is one shard
of W pieces. Positions in a bucket depend on the pieces only, so all meshes of W ranks round alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError

Ranks = ProcessGroup | DeviceMesh
"""Ranks as torch names them."""


class Shape(NamedTuple):
    """A grid of ranks, numbered row by row: a row holds the model once."""

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        """The number of ranks."""
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
        world: number of ranks.
        mesh: ``(replicate, shard)``, or a ``DeviceMesh`` of two axes; otherwise a row of the grid
            is a host.
        local_size: ranks on this host; ``None`` = unknown.

    Raises:
        ConfigError: the product is not the number of ranks, nothing says the shape, or the strategy
            cannot use two axes.
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


class Mesh(NamedTuple):
    """One rank's position in a grid of ranks."""

    shard: Comm  # the ranks over which this rank's parameters are sharded
    replicate: Comm  # the ranks that have the same shard

    @classmethod
    def of(cls, ranks: Comm, splits: bool, shape: Shape | None = None) -> Mesh:
        """A mesh of ``ranks``: a grid of that ``shape``, or one axis.

        Args:
            splits: parameters are split, or else replicated over all axes.
        """
        alone = LocalComm(ranks.device)
        if shape is not None and splits:
            replicate, shard = ranks.axes(*shape)
            return cls(shard, replicate)
        return cls(ranks, alone) if splits or ranks.size == 1 else cls(alone, ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shard.size * self.replicate.size


def gather_rows(mine: Tensor, axes: Sequence[Comm], label: Label) -> Tensor:
    """All-gather ``mine``, ``[n]``, over several axes, the innermost first: ``[ranks, n]``."""
    rows, ranks = mine, 1
    for comm in axes:
        rows, ranks = comm.gather_rows(rows.reshape(-1), label), ranks * comm.size
    return rows.view(ranks, mine.numel())
