"""Where one rank's part of a parameter lies, and how the ranks put their parts together.

Each parameter of a sharded model carries a ``Sharding``. So does every tensor that was computed
from one rank's part, such as a gradient or a moving average (see ``shard_tensor``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.layout import Layout

__all__ = ["Sharding", "sharding_of"]


@dataclass(frozen=True, eq=False)
class Sharding:
    """Where a parameter's elements are.

    Attributes:
        name: the parameter's first full name.
        unit: its unit's name.
        placement: ``"fully_sharded"`` or ``"replicated"`` (the optimizer sees all of it).
        shape: the whole parameter's shape.
        start, stop: the range of the flattened parameter that this rank stores.
        atom: elements that are never split between ranks (a row, or 1).
        layout: of its bucket, in which its slot has its name.
        comm: the ranks that have the other ranges.
    """

    name: str
    unit: str
    placement: str
    shape: torch.Size
    start: int
    stop: int
    atom: int
    layout: Layout = field(repr=False)
    comm: Comm = field(repr=False)

    def cut(self, whole: Tensor, local_shape: torch.Size) -> Tensor:
        """This rank's part of ``whole`` (``shape`` elements), in the shape of its shard."""
        return whole.reshape(-1)[self.start : self.stop].view(local_shape)

    def cuts_like(self, other: Sharding) -> bool:
        """Has each rank the same range of both? The answer is the same on every rank."""
        return self is other or self._cut == other._cut

    @property
    def _cut(self) -> tuple[object, ...]:
        start = self.layout.slot(self.name).start
        return self.shape, self.atom, start, self.layout.shard_numel, self.comm.size

    def whole(self, part: Tensor) -> Tensor:
        """Every rank's ``part`` put together: ``shape``, in new memory. A collective."""
        comm, slot = self.comm, self.layout.slot(self.name)
        ranges = [self.layout.owned(slot, rank) for rank in range(comm.size)]
        sizes = [stop - start for start, stop in ranges]
        rows = comm.allocate(comm.size * max(sizes), part.dtype).view(comm.size, max(sizes))
        rows[comm.rank, : part.numel()] = part.reshape(-1)
        if rows.numel():
            comm.all_gather(rows.view(-1), Label("read", self.name)).wait()
        pieces = [row[:size] for row, size in zip(rows.unbind(), sizes, strict=True)]
        return torch.cat(pieces).view(self.shape).to(part.device)


def sharding_of(tensor: Tensor) -> Sharding | None:
    """A parameter's sharding, or that of a value of it; ``None`` for a tensor that has none."""
    return getattr(tensor, "sharding", None)
