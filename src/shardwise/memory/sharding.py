"""The place of one rank's part of a parameter, and how the ranks put their parts together.

Each parameter of a sharded model carries a ``Sharding``. So does every tensor that was computed
from one rank's part, such as a gradient or a moving average (see ``shard_tensor``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardwise.comm.mesh import gather_rows
from shardwise.comm.protocol import Comm, Label
from shardwise.plan.layout.layout import Layout, Slot


class Engine(Protocol):
    """The parts of a model's engine that its shards need."""

    comm: Comm  # all ranks of the model

    @property
    def computing(self) -> bool:
        """Is a forward or backward pass of the model under way?"""

    def rest(self) -> None:
        """Between steps, shard what a forward pass left whole."""

    def make_whole(self, unit: str) -> None:
        """Unshard the parameters of a unit until the step is over."""

    def was_read(self, whole: Any, result: Any) -> list[Tensor]:
        """``result`` was computed from a ``whole`` parameter between passes: its views in it."""

    def before_write(self, unit: str) -> None:
        """Shards of a unit are written next: nobody may still read or send what they hold."""

    def call(
        self, module: nn.Module, unit: str | None, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run ``func`` as the ``forward`` of ``module`` is run: ``unit`` is whole inside."""


@dataclass(eq=False, repr=False)
class Sharding:
    """The place of a parameter's elements."""

    slot: Slot  # its place in its bucket
    unit: str  # its unit's name
    placement: str  # "fully_sharded" or "replicated" (the optimizer sees all of it)
    layout: Layout  # of its bucket
    position: int  # which of the layout's shards this rank holds
    axes: tuple[Comm, ...]  # over them all shards are gathered, in order
    engine: Callable[[], Engine | None] = lambda: None  # a weak reference
    #: What was read from the parameter and shares the shard's memory, by ``id``.
    aliases: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self.name, self.shape = self.slot.name, torch.Size(self.slot.shape)
        #: The range of the flattened parameter that this rank stores.
        self.start, self.stop = self.layout.owned(self.slot, self.position)

    @property
    def serving(self) -> Engine | None:
        """The engine, while a pass is under way in which it can make parameters whole."""
        engine = self.engine()
        return engine if engine is not None and engine.computing else None

    def before_write(self) -> None:
        """The shard of the parameter is written next."""
        if (engine := self.engine()) is not None:
            engine.before_write(self.unit)

    def copy_aliases(self) -> None:
        """Copy the values of aliases into memory of their own: the shard gets other ones."""
        for tensor in list(self.aliases.values()):
            tensor.data = tensor.clone()
        self.aliases.clear()

    def cut(self, whole: Tensor, local_shape: torch.Size) -> Tensor:
        """This rank's part of ``whole`` (``shape`` elements), in the shape of its shard."""
        return whole.reshape(-1)[self.start : self.stop].view(local_shape)

    def cuts_like(self, other: Sharding) -> bool:
        """Has each rank the same range of both? The answer is the same on every rank."""
        return self is other or self._cut == other._cut

    @property
    def _cut(self) -> tuple[object, ...]:
        slot = self.slot
        return slot.shape, slot.atom, slot.start, self.layout.shard_numel, self.layout.world

    def whole(self, part: Tensor) -> Tensor:
        """Every rank's ``part`` put together: ``shape``, in new memory. A collective."""
        ranges = [self.layout.owned(self.slot, shard) for shard in range(self.layout.world)]
        sizes = [stop - start for start, stop in ranges]
        padded = torch.empty(max(sizes), dtype=part.dtype, device=self.axes[0].device)
        padded[: part.numel()] = part.detach().reshape(-1)  # a graph would outlive the shard
        rows = gather_rows(padded, self.axes, Label("read", self.name))
        pieces = [row[:size] for row, size in zip(rows.unbind(), sizes, strict=True)]
        return torch.cat(pieces).view(self.shape).to(part.device)


def sharding_of(tensor: Tensor) -> Sharding | None:
    """A parameter's sharding, or that of a value of it; ``None`` for a tensor that has none."""
    return getattr(tensor, "sharding", None)
