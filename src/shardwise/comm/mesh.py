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

from typing import NamedTuple

from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm


class Mesh(NamedTuple):
    """One rank's position in a grid of ranks."""

    shard: Comm  # the ranks over which this rank's parameters are sharded
    replicate: Comm  # the ranks that have the same shard

    @classmethod
    def of(cls, ranks: Comm, splits: bool) -> Mesh:
        """A mesh of ``ranks`` with one axis: sharded if ``splits``, else replicated."""
        alone = LocalComm(ranks.device)
        return cls(ranks, alone) if splits or ranks.size == 1 else cls(alone, ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shard.size * self.replicate.size
