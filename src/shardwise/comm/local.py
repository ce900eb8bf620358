"""A group of one rank: every collective is free, because there are no peers.

No copy, no message, nothing counted. So one path serves one rank and many, and one rank pays
for neither; the ordinary way still moves every parameter through a gather to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.group import Ending
from shardwise.comm.protocol import Comm, Done, Label, Pending, Use

__all__ = ["LocalComm"]


class LocalComm(Comm):
    """Rank 0 of 1. Final; see ``Comm``."""

    def __init__(self, device: torch.device | str = "cpu", ending: Ending | None = None) -> None:
        super().__init__(0, 1, device)
        self._ending = ending or Ending()

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        return Done()

    def exchange(self, full: Tensor, use: Use, label: Label) -> Pending:
        use((full,))
        return Done()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        return Done()

    def close(self) -> None:
        ending, self._ending = self._ending, Ending()
        ending.then()
