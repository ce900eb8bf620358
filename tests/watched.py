"""A comm that is watched: which collectives, how many gathers in flight, what memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.memory import Memory
from shardwise.comm.protocol import Comm, Label, OnReceived, Pending, Sizes
from tests.fake import FakeComm


class Watched(Comm):
    """A comm around another.

    Attributes:
        log: the collectives, in the order in which they were issued.
        flying, most: gathers issued and not waited for, now and at most.
        allocated: the memory that was asked for.
    """

    def __init__(self, inner: Comm, dirty: bool = False) -> None:
        memory = WatchedMemory(inner.device, dirty)
        super().__init__(inner.rank, inner.size, inner.device, memory)
        self.inner, self.counters, self.allocated = inner, inner.counters, memory.allocated
        self.log: list[str] = []
        self.flying = self.most = 0
        self._axes: dict[tuple[int, int], tuple[Comm, Comm]] = {}

    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        if (replicate, shard) not in self._axes:
            one, other = self.inner.axes(replicate, shard)
            self._axes[replicate, shard] = self._axis(one), self._axis(other)
        return self._axes[replicate, shard]

    def _axis(self, inner: Comm) -> Comm:
        """An axis whose collectives are logged and counted with those of all ranks."""
        if inner.size == 1:
            return inner
        inner.counters = self.counters
        axis = Watched(inner)
        axis.log = self.log
        return axis

    def fence(self, label: Label) -> None:
        self.inner.fence(label)

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        self.log.append(str(label))
        pending = self.inner.all_gather(full, label)
        if label.op != "gather":
            return pending
        self.flying += 1
        self.most = max(self.most, self.flying)
        return Landing(pending, self)

    def exchange(
        self, full: Tensor, use: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        self.log.append(str(label))
        return self.inner.exchange(full, use, label, out)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        self.log.append(str(label))
        return self.inner.broadcast(tensor, root, label)

    def all_to_all(self, sent: Tensor, sizes: Sizes, label: Label) -> Tensor:
        self.log.append(str(label))
        return self.inner.all_to_all(sent, sizes, label)

    def agree(self, facts: Mapping[str, str]) -> None:
        self.inner.agree(facts)


class WatchedMemory(Memory):
    """Keeps what it gave out; full of NaN if ``dirty``, to show that nobody relies on zeros."""

    def __init__(self, device: torch.device, dirty: bool) -> None:
        super().__init__(device)
        self._dirty = dirty
        self.allocated: list[Tensor] = []

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = super()._new(numel, dtype)
        if self._dirty and memory.is_floating_point():
            memory.fill_(float("nan"))
        self.allocated.append(memory)
        return memory


@dataclass
class Landing:
    """A gather in flight, until somebody waits for it."""

    pending: Pending
    watched: Watched

    def wait(self) -> None:
        self.pending.wait()
        self.watched.flying -= 1


class Late(FakeComm):
    """A rank without peers whose collectives happen when they are waited for, as on a device.

    Attributes:
        waited: of each collective, whether somebody has waited for it.
        fences: their labels.
    """

    def __init__(self, rank: int, size: int, waited: list[bool] | None = None) -> None:
        super().__init__(rank, size)
        self.waited = list[bool]() if waited is None else waited
        self.fences: list[str] = []
        self.memory = WatchedMemory(self.device, dirty=True)

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        if full.is_floating_point():
            for peer, row in enumerate(full.detach().view(self.size, -1)):
                row.fill_(float("nan")) if peer != self.rank else None
        return Waited(self.waited, partial(super().all_gather, full, label))

    def exchange(
        self, full: Tensor, on_received: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        return Waited(self.waited, partial(super().exchange, full, on_received, label, out))

    def fence(self, label: Label) -> None:
        self.fences.append(str(label))

    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        row, column = divmod(self.rank, shard)
        return Late(row, replicate, self.waited), Late(column, shard, self.waited)


class Waited:
    """A collective that ``happens`` at the first wait."""

    def __init__(self, waited: list[bool], happens: Callable[[], object]) -> None:
        self.waited, self.number, self.happens = waited, len(waited), happens
        waited.append(False)

    def wait(self) -> None:
        if not self.waited[self.number]:
            self.waited[self.number] = True
            self.happens()
