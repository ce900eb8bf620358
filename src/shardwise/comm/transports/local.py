"""The communicator of a single rank, whose collectives cost nothing.

There are no copies, messages or counts, so the engine needs no special case for one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.protocol import CLOSED, Comm, Completed, Label, OnReceived, Pending, Sizes
from shardwise.comm.transports.transport import IMMEDIATE, Shutdown


class LocalComm(Comm):
    """Rank 0 of 1. Final; see ``Comm``."""

    def __init__(self, device: torch.device | str = "cpu", shutdown: Shutdown = IMMEDIATE) -> None:
        super().__init__(0, 1, device)
        self._shutdown = shutdown

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        return Completed()

    def exchange(
        self, full: Tensor, on_received: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        on_received((full,))
        return Completed()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        return Completed()

    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        return self, self

    def all_to_all(self, sent: Tensor, sizes: Sizes, label: Label) -> Tensor:
        return sent

    def close(self, reason: str = CLOSED) -> None:
        shutdown, self._shutdown = self._shutdown, IMMEDIATE
        shutdown.callback()
