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

from shardwise.comm.grid import Axis, Grid, Shape
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports.local import LocalComm

Ranks = ProcessGroup | DeviceMesh
"""Ranks as torch names them."""


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
    def grid(self) -> Grid:
        """The same in numbers."""
        axes = ((c.rank, c.size, c.memory.shared, c.has_reduce_scatter) for c in self)
        return Grid(*(Axis(n, *axis) for n, axis in enumerate(axes)))


def gather_rows(mine: Tensor, axes: Sequence[Comm], label: Label) -> Tensor:
    """All-gather ``mine``, ``[n]``, over several axes, the innermost first: ``[ranks, n]``."""
    rows, ranks = mine, 1
    for comm in axes:
        rows, ranks = comm.gather_rows(rows.reshape(-1), label), ranks * comm.size
    return rows.view(ranks, mine.numel())
