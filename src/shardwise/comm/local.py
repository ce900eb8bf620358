"""A group of one rank: every collective is free, because there is nobody to talk to.

No copy, no message, nothing counted. So one path serves one rank and many, and one rank pays
for neither; the ordinary way still moves every parameter through a gather to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shardwise.comm.malloc import fresh
from shardwise.comm.protocol import Counters, Label, Pending

__all__ = ["Done", "LocalComm"]


class Done:
    """A collective that is complete when it is issued. Final; see ``Pending``."""

    def wait(self) -> None:
        """Nothing to wait for."""


class LocalComm:
    """Rank 0 of 1. Final; see ``Comm``."""

    rank = 0
    size = 1
    shares = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.counters = Counters()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh(numel, dtype, self.device)

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

    def fence(self, label: Label) -> None:
        """No memory is shared."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        return Done()

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        """``out`` is ``full``, which costs one copy unless they already share their memory."""
        if out.data_ptr() != full.data_ptr() or out.dtype != full.dtype:
            with torch.no_grad():
                out.copy_(full)
        if divisor != 1 and not mean:
            with torch.no_grad():
                out.div_(divisor)
        return Done()

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        return Done()

    def agree(self, facts: Mapping[str, str]) -> None:
        """One rank agrees with itself."""

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
