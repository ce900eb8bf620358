"""The axes of a group: over one of them parameters are split, over the other they are copied.

Of four ranks, 0 and 1 split the parameters, and 2 and 3 hold copies:

    shard ──▶           ranks  0  1     A shard has one piece for each copy. The ranks that hold it
    replicate           below  2  3     sum a piece each, and send that to each other.
        │
        ▼               bucket  | piece 0  piece 1 | piece 2  piece 3 |
                        held by | ranks 0 and 2    | ranks 1 and 3    |

Under ``full_shard`` there is one copy, and a piece is a shard. Under ``no_shard`` there is one
shard of W pieces. Places in a bucket depend on the pieces alone, so all meshes of W ranks round
alike.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm

__all__ = ["Mesh"]


class Mesh(NamedTuple):
    """One rank's place in a grid of ranks."""

    shard: Comm  # those with which this rank splits parameters
    replicate: Comm  # those that hold the same as this rank

    @classmethod
    def of(cls, ranks: Comm, splits: bool) -> Mesh:
        """The mesh in which all ``ranks`` split the parameters, or each of them has a copy."""
        alone = LocalComm(ranks.device)
        return cls(ranks, alone) if splits or ranks.size == 1 else cls(alone, ranks)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.shard.size * self.replicate.size
