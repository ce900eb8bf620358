"""Rank r of N with no peers: what a rank of a large group would do, on a laptop.

Every peer is taken to hold what this rank holds, so results are defined, finite and the same
on every run: the other pieces of a gather are copies of this rank's piece, and a sum is N times
this rank's own addend. They are not what N real ranks would compute. Bytes and calls are counted
exactly as a real group counts them. A real group of 1,024 ranks would take 1,024 processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Done, Label, Pending, Use, rows_of, splits
from shardwise.errors import ConfigError

__all__ = ["FakeComm"]


class FakeComm(Comm):
    """One rank of a group that does not exist. Final; see ``Comm``."""

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size}: ranks are numbered from 0 to {size - 1}.")
        super().__init__(rank, size, device)

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        rows = self._counted(full, label)
        with torch.no_grad():
            rows.copy_(rows[self.rank].clone())
        return Done()

    def exchange(self, full: Tensor, use: Use, label: Label) -> Pending:
        rows = self._counted(full, label)
        use(rows[self.rank].expand_as(rows))
        return Done()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """``tensor`` stays: the root holds the same."""
        self.counters.sent(label.op, (self.size - 1) * tensor.nbytes if self.rank == root else 0)
        return Done()

    def _counted(self, full: Tensor, label: Label) -> Tensor:
        rows = rows_of(splits(full, self.size, label), self.size)
        self.counters.sent(label.op, full.nbytes - full.nbytes // self.size)
        return rows
