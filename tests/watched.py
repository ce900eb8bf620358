"""A comm that is watched: which collectives, how many gathers in flight, what memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label, Pending


@dataclass
class Watched:
    """A comm around another.

    Attributes:
        log: the collectives, in the order in which they were issued.
        flying, most: gathers issued and not waited for, now and at most.
        allocated: the memory that was asked for.
        dirty: hand memory out full of NaN, to show that nobody relies on what is in it.
    """

    inner: Comm
    log: list[str] = field(default_factory=list)
    flying: int = 0
    most: int = 0
    allocated: list[Tensor] = field(default_factory=list)
    dirty: bool = False

    shares: bool = False

    def __post_init__(self) -> None:
        self.rank, self.size = self.inner.rank, self.inner.size
        self.device, self.counters = self.inner.device, self.inner.counters

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self.inner.allocate(numel, dtype)
        if self.dirty and memory.is_floating_point():
            memory.fill_(float("nan"))
        self.allocated.append(memory)
        return memory

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

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

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        self.log.append(str(label))
        return self.inner.reduce_scatter(out, full, label, divisor, mean)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        self.log.append(str(label))
        return self.inner.broadcast(tensor, root, label)

    def agree(self, facts: Mapping[str, str]) -> None:
        self.inner.agree(facts)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inner.__exit__(kind, error, trace)


@dataclass
class Landing:
    """A gather in flight, until somebody waits for it."""

    pending: Pending
    watched: Watched

    def wait(self) -> None:
        self.pending.wait()
        self.watched.flying -= 1
