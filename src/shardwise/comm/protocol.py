"""What the engine knows of the network: three collectives that move bytes, and a way to wait.

Everything else (gloo, NCCL, threads, one rank alone, a rank with no peers) is an
implementation beside this file. A Comm computes nothing: ``reduction`` sums what it exchanges, so
that sums are the same bits over every transport. The ordinary way, calling ``torch.distributed``
wherever a collective is needed, ties the engine to one process per rank and to one global group;
here a rank is a value that is passed in, so ranks can be threads and tests need no launcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from shardwise.comm.memory import Memory
from shardwise.errors import ConfigError

__all__ = ["Comm", "Counters", "Done", "Label", "Pending", "Use", "rows_of", "splits"]

Use = Callable[[Sequence[Tensor] | Tensor], None]
"""What is done with the pieces that the ranks sent, in rank order."""


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


class Done:
    """A collective that is complete when it is issued. Final; see ``Pending``."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Comm(ABC):
    """One rank's end of a group of ``size`` ranks.

    Collectives are issued in the same order on every rank.

    Attributes:
        memory: where tensors lie that this group sends.
        sums: has the transport a ``reduce_scatter`` of its own?
        averages: can that one divide by ``size``, as a self-test showed on every rank?
    """

    sums = False
    averages = False

    def __init__(
        self, rank: int, size: int, device: torch.device | str, memory: Memory | None = None
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.memory = memory or Memory(self.device)
        self.counters = Counters()

    @abstractmethod
    def all_gather(self, full: Tensor, label: Label) -> Pending:
        """Fill ``full`` from every rank, in place.

        Args:
            full: ``[size * n]``; before the call ``full[rank * n : (rank + 1) * n]`` holds this
                rank's piece, afterwards every piece is there.
        """

    def gather_rows(self, mine: Tensor, label: Label) -> Tensor:
        """Every rank's ``mine``, ``[n]``: ``[size, n]`` in new memory. A collective."""
        full = self.memory.gradient(self.size * mine.numel(), mine.dtype)
        rows = full.view(self.size, mine.numel())
        rows[self.rank] = mine
        self.all_gather(full, label).wait()
        return rows

    @abstractmethod
    def exchange(self, full: Tensor, use: Use, label: Label) -> Pending:
        """Send piece r of ``full`` to rank r, and ``use`` what every rank sent to this one.

        Args:
            full: ``[size * n]``. Unchanged, and not to be written or freed before ``wait``.
            use: called once before ``wait`` returns, with ``size`` tensors ``[n]`` in rank order,
                or with one tensor ``[size, n]``. They are valid during the call: some transports
                show the memory of peers.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """Copy rank ``root``'s contiguous ``tensor`` to every rank, in place."""

    def reduce_scatter(self, out: Tensor, full: Tensor, average: bool, label: Label) -> Pending:
        """The transport's own sum of all ranks' ``full``, in an order of its own, if it ``sums``.

        Args:
            out: ``[n]``, this rank's piece of the sum, in the same dtype.
            full: ``[size * n]``, as in ``exchange``.
            average: divide by ``size``, if it ``averages``.
        """
        raise ConfigError(f"{label}: this transport has no sum of its own; exchange and add up.")

    def fence(self, label: Label) -> None:  # noqa: B027 - without peers there is nothing to do
        """Where memory is shared: return when every rank is here. Elsewhere: nothing to do."""

    def agree(self, facts: Mapping[str, str]) -> None:  # noqa: B027 - without peers there is nothing to do
        """Compare ``facts`` (name → short text) between ranks, outside the data path.

        Raises:
            RanksDisagree: naming each fact that differs, with the ranks and both texts.
        """

    def close(self) -> None:  # noqa: B027 - without peers there is nothing to do
        """Release what this object opened. Safe to call twice, and after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and tell the peers whether this rank ended by an error."""
        self.close()


def splits(full: Tensor, size: int, label: Label) -> Tensor:
    """``full``, detached, once it is known to be ``[size * n]``.

    Raises:
        ConfigError: it does not split, or is not contiguous.
    """
    if full.ndim != 1 or full.numel() % size or not full.is_contiguous():
        raise ConfigError(
            f"{label}: a buffer of shape {tuple(full.shape)} with strides {full.stride()} does not "
            f"split into {size} equal, contiguous pieces. Make it flat, and pad it to a multiple "
            f"of {size}."
        )
    return full.detach() if full.requires_grad else full


def rows_of(full: Tensor, size: int) -> Tensor:
    """``[size * n]`` as ``[size, n]``: one row for each rank."""
    return full.view(size, full.numel() // size)
