"""Where one rank's part of a parameter lies, and how the ranks put their parts together.

Each parameter of a sharded model carries a ``Sharding``. So does every tensor that was computed
from one rank's part, such as a gradient or a moving average (see ``shard_tensor``).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.layout import Layout

__all__ = ["Engine", "Sharding", "sharding_of"]


class Engine(Protocol):
    """What shards ask of the engine of their model."""

    @property
    def computing(self) -> bool:
        """Is a forward or backward pass of the model under way?"""

    def make_whole(self, unit: str) -> None:
        """Let the parameters of a unit be whole until the step is over."""

    def before_write(self, unit: str) -> None:
        """Shards of a unit are written next: nobody may still read or send what they hold."""


@dataclass(eq=False)
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
        engine: the model's, while it is sharded.
        lent: what was read from the parameter and shares the shard's memory, by ``id``.
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
    engine: weakref.ref[Engine] | None = field(default=None, repr=False)
    lent: weakref.WeakValueDictionary[int, Tensor] = field(
        default_factory=weakref.WeakValueDictionary, repr=False
    )

    @property
    def serving(self) -> Engine | None:
        """The engine, while a pass is under way in which it can make parameters whole."""
        engine = None if self.engine is None else self.engine()
        return engine if engine is not None and engine.computing else None

    def before_write(self) -> None:
        """The shard of the parameter is written next."""
        if self.engine is not None and (engine := self.engine()) is not None:
            engine.before_write(self.unit)

    def end_loans(self) -> None:
        """What was lent keeps its values, in memory of its own: the shard gets other ones."""
        for tensor in list(self.lent.values()):
            tensor.data = tensor.clone()
        self.lent.clear()

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
        mine = torch.empty(max(sizes), dtype=part.dtype, device=part.device)
        mine[: part.numel()] = part.reshape(-1)
        rows = comm.gather_rows(mine, Label("read", self.name))
        pieces = [row[:size] for row, size in zip(rows.unbind(), sizes, strict=True)]
        return torch.cat(pieces).view(self.shape).to(part.device)


def sharding_of(tensor: Tensor) -> Sharding | None:
    """A parameter's sharding, or that of a value of it; ``None`` for a tensor that has none."""
    return getattr(tensor, "sharding", None)
