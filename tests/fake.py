"""One rank of a group of N without peers, to simulate a large group in one process.

Every peer is assumed to have this rank's data, so results are defined, finite and the same on
every run: the other pieces of a gather are copies of this rank's piece, and a sum is N times this
rank's addend. They are not what N real ranks would compute. Bytes and calls are counted as in a
real group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.protocol import (
    Comm,
    Completed,
    Label,
    OnReceived,
    Pending,
    Sizes,
    check_divisible,
    rows_of,
)
from shardwise.errors import ConfigError


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
        return Completed()

    def exchange(
        self, full: Tensor, on_received: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        rows = self._counted(full, label)
        on_received(rows[self.rank].expand_as(rows))
        return Completed()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """``tensor`` is unchanged: the root has the same."""
        self.counters.sent(label.op, (self.size - 1) * tensor.nbytes if self.rank == root else 0)
        return Completed()

    def all_to_all(self, sent: Tensor, sizes: Sizes, label: Label) -> Tensor:
        """Give zeros for what peers send: their pieces have other sizes than this rank's."""
        pieces = [sent.new_zeros(row[self.rank]) for row in sizes]
        own = sent.split(list(sizes[self.rank]))[self.rank]
        pieces[self.rank] = own
        self.counters.sent(label.op, sent.nbytes - own.nbytes)
        return torch.cat(pieces)

    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        row, column = divmod(self.rank, shard)
        return FakeComm(row, replicate, self.device), FakeComm(column, shard, self.device)

    def _counted(self, full: Tensor, label: Label) -> Tensor:
        flat = full if full.ndim == 2 else check_divisible(full, self.size, label)
        rows = rows_of(flat, self.size)
        self.counters.sent(label.op, full.nbytes - full.nbytes // self.size)
        return rows
