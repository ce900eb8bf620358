"""Rank r of N with no peers: what a rank of a large group would do, on a laptop.

Every peer is taken to hold what this rank holds, so results are defined, finite and the same
on every run: the other pieces of a gather are copies of this rank's piece, and a sum is N times
this rank's own addend. They are not what N real ranks would compute. Bytes and calls are counted
exactly as a real group counts them. A real group of 1,024 ranks would take 1,024 processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shardwise.comm.local import Done
from shardwise.comm.malloc import fresh
from shardwise.comm.messages import check_splits
from shardwise.comm.protocol import Counters, Label, Pending
from shardwise.errors import ConfigError

__all__ = ["FakeComm"]


class FakeComm:
    """One rank of a group that does not exist. Final; see ``Comm``."""

    shares = False

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size}: ranks are numbered from 0 to {size - 1}.")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.counters = Counters()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh(numel, dtype, self.device)

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

    def fence(self, label: Label) -> None:
        """No memory is shared."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        mine = self._mine(full, label)
        self.counters.sent(label.op, (self.size - 1) * mine.nbytes)
        with torch.no_grad():
            full.view(self.size, mine.numel()).copy_(mine.clone())
        return Done()

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        mine = self._mine(full, label)
        self.counters.sent(label.op, (self.size - 1) * mine.nbytes)
        with torch.no_grad():
            out.copy_(mine)
            if not mean:
                out.mul_(self.size / divisor)
        return Done()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """``tensor`` stays: the root holds the same."""
        self.counters.sent(label.op, (self.size - 1) * tensor.nbytes if self.rank == root else 0)
        return Done()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Peers that hold what this rank holds agree with it."""

    def close(self) -> None:
        """Nothing was opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mine(self, full: Tensor, label: Label) -> Tensor:
        check_splits(full, self.size, label)
        return full.detach().view(self.size, full.numel() // self.size)[self.rank]
