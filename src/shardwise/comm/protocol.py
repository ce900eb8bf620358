"""What the engine knows of the network: four methods and a way to wait.

Everything else (gloo, NCCL, threads, one rank alone, a rank with no peers) is an
implementation beside this file. The ordinary way, calling ``torch.distributed`` wherever
a collective is needed, ties the engine to one process per rank and to one global group;
here a rank is a value that is passed in, so ranks can be threads and tests need no launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

__all__ = ["Comm", "Counters", "Label", "Pending"]


@dataclass(frozen=True)
class Label:
    """What a collective is for. Ranks compare labels: bytes of one never pass for another's.

    Attributes:
        op: ``"gather"``, ``"reduce"``, ``"broadcast"`` or another verb of the engine.
        unit: the unit's name, for example ``"blocks.3"`` (``""`` where there is none).
    """

    op: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.unit}".strip()


@dataclass
class Counters:
    """What one rank has sent so far, by operation. Read it, or ``reset`` it between steps."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    seconds_waited: dict[str, float] = field(default_factory=dict)

    def sent(self, op: str, nbytes: int) -> None:
        self.calls[op] = self.calls.get(op, 0) + 1
        self.bytes_sent[op] = self.bytes_sent.get(op, 0) + nbytes

    def waited(self, op: str, seconds: float) -> None:
        self.seconds_waited[op] = self.seconds_waited.get(op, 0.0) + seconds

    def reset(self) -> None:
        self.calls.clear()
        self.bytes_sent.clear()
        self.seconds_waited.clear()


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream would see it).

        Raises:
            RanksDisagree: a peer is at another collective, or is gone.
        """


class Comm(Protocol):
    """One rank's end of a group of ``size`` ranks that split parameters among them.

    Collectives are issued in the same order on every rank. Results are deterministic where the
    backend allows it: on gloo and threads, sums are formed in rank order.
    """

    rank: int
    size: int
    device: torch.device
    counters: Counters
    shares: bool
    """Is ``allocate_bucket`` the same memory on every rank, so that a gather moves nothing?"""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's own memory, ``[numel]``, uninitialised, on ``device``."""

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a full bucket, ``[numel]``; asked for in the same order on every rank."""

    def fence(self, label: Label) -> None:
        """Where memory is shared: return when every rank is here. Elsewhere: nothing to do."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        """Fill ``full`` from every rank, in place.

        Args:
            full: ``[size * n]``; before the call ``full[rank * n : (rank + 1) * n]`` holds this
                rank's piece, afterwards every piece is there.
        """

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        """Sum the ranks' ``full``, keep this rank's piece, and divide it.

        Args:
            out: ``[n]``, in the dtype the sum is formed in (wide).
            full: ``[size * n]``, in the dtype that travels (narrow or equal). Unchanged, and not
                to be written or freed before ``wait``.
            divisor: what the sum is divided by, before it is written where it is formed here.
            mean: divide by ``size`` instead, or let the backend average.
        """

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """Copy rank ``root``'s contiguous ``tensor`` to every rank, in place."""

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare ``facts`` (name → short text) between ranks, outside the data path.

        Raises:
            RanksDisagree: naming each fact that differs, with the ranks and both texts.
        """

    def close(self) -> None:
        """Release what this object opened. Safe to call twice, and after an error."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and tell the peers whether this rank ended by an error."""
