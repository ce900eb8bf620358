"""The interface of a communicator: three collectives that move bytes, and a handle to wait on.

gloo, NCCL, threads and one rank alone are implementations beside this file.
A Comm computes nothing: ``reduction`` sums what it exchanges. Calling ``torch.distributed`` would
tie the engine to one process per rank and one global group; a Comm is passed in, so ranks can be
threads and tests need no launcher.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from shardwise.comm.memory import Memory
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

CLOSED, ENDED = "it closed its communicator", "its process ended normally"

OnReceived = Callable[[Sequence[Tensor] | Tensor], None]
"""A callback that gets the pieces that the ranks sent, in rank order."""

Sizes = Sequence[Sequence[int]]
"""``sizes[r][s]``: the elements that rank r sends to rank s."""


@dataclass(frozen=True)
class Label:
    """The purpose of a collective. Ranks compare labels, so unlike collectives never match."""

    op: str  # "gather", "reduce", "broadcast" or another verb of the engine
    unit: str = ""  # the unit's name, for example "blocks.3"

    def __str__(self) -> str:
        return f"{self.op} {self.unit}".strip()


@dataclass
class Counters:
    """Calls, bytes sent and seconds waited of one rank, by operation, since ``reset``."""

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
        """Wait for the result (on CUDA: make the current stream wait for it).

        Raises:
            RanksDisagree: a peer issued another collective, or has ended.
        """


class Completed:
    """A collective that is complete when it is issued. Final; see ``Pending``."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Comm(ABC):
    """One rank's communicator in a group of ``size`` ranks.

    Every rank issues the same collectives in the same order. Its ``memory`` allocates the tensors
    that the group sends.
    """

    has_reduce_scatter = False  # has the transport a ``reduce_scatter`` of its own?
    has_average = False  # can that divide by ``size``? A self-test passed on every rank.

    def __init__(
        self, rank: int, size: int, device: torch.device | str, memory: Memory | None = None
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.memory = memory or Memory(self.device)
        self.counters = Counters()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    @property
    def world_size(self) -> int:
        """``size``, by torch's name."""
        return self.size

    @checked
    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float:
        """The mean of a metric over the ranks, the same on each, in rank order. A collective.

        Args:
            value: this rank's, such as its mean loss: a number, or a tensor of one element.
            weight: of how many samples it is the mean. A rank of weight 0 does not count.

        Returns:
            The weighted mean; NaN where no rank counts.
        """
        numbers = [v.item() if isinstance(v, Tensor) else v for v in (value, weight)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = self.gather_rows(mine, Label("mean", "of a metric")).tolist()
        total = sum(weight for _, weight in rows)
        return sum(v * weight for v, weight in rows if weight) / total if total else math.nan

    @property
    def is_usable(self) -> bool:
        """Is it neither closed nor failed?"""
        return True

    @abstractmethod
    def all_gather(self, full: Tensor, label: Label) -> Pending:
        """Fill ``full`` from every rank, in place.

        Args:
            full: ``[size * n]``; before the call ``full[rank * n : (rank + 1) * n]`` holds this
                rank's piece, afterwards it holds every rank's.
        """

    def gather_rows(self, mine: Tensor, label: Label) -> Tensor:
        """All-gather ``mine``, ``[n]``, into new memory, ``[size, n]``. A collective."""
        full = self.memory.gradient(self.size * mine.numel(), mine.dtype)
        rows = full.view(self.size, mine.numel())
        rows[self.rank] = mine
        self.all_gather(full, label).wait()
        return rows

    @abstractmethod
    def exchange(
        self, full: Tensor, on_received: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        """Send piece r of ``full`` to rank r, and ``on_received`` what every rank sent to this one.

        Args:
            full: ``[size * n]``; where ranks send messages also ``[size, n]``, whose rows may be
                the same memory. Unchanged; it must not be written or freed before ``wait``.
            on_received: called once before ``wait`` returns, with ``size`` tensors ``[n]`` in rank
                order, or with one tensor ``[size, n]``. They are valid during the call only: they
                may be memory of peers.
            out: ``[n]``, free until then; one of the first two of these tensors may lie in it.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        """Copy rank ``root``'s contiguous ``tensor`` to every rank, in place."""

    def reduce_scatter(self, out: Tensor, full: Tensor, average: bool, label: Label) -> Pending:
        """The transport's own reduce-scatter, if it ``has_reduce_scatter``; the order is its own.

        Args:
            out: ``[n]``, this rank's piece of the sum, in the same dtype.
            full: ``[size * n]``, as in ``exchange``.
            average: divide by ``size``, if it ``has_average``.
        """
        raise ConfigError(f"{label}: this transport has no reduce_scatter; use exchange.")

    @abstractmethod
    def all_to_all(self, sent: Tensor, sizes: Sizes, label: Label) -> Tensor:
        """Send each rank a piece, of any size, and return what every rank sent to this one.

        Args:
            sent: ``[sum(sizes[rank])]``, the pieces in rank order. Unchanged; it may not be written
                afterwards, since peers may still read it.
            sizes: the same on every rank.

        Returns:
            ``[sum(row[rank] for row in sizes)]``, in rank order.
        """

    @abstractmethod
    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        """The two axes of a grid of these ranks, numbered row by row. A collective.

        The same objects for the same grid; they are closed with this one.

        Returns:
            The ranks of this rank's column, of which there are ``replicate``, and those of its row.
        """

    def fence(self, label: Label) -> None:  # noqa: B027 - without peers there is nothing to do
        """A barrier of the ranks, here or on an axis, that share memory; otherwise a no-op."""

    def agree(self, facts: Mapping[str, str]) -> None:  # noqa: B027 - without peers there is nothing to do
        """Compare ``facts`` (name → short text) between ranks, outside the data path.

        Raises:
            RanksDisagree: with each fact that differs, the ranks and their texts.
        """

    def close(self, reason: str = CLOSED) -> None:  # noqa: B027 - without peers there is nothing to do
        """Release all resources, and report ``reason`` to the peers. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(f"it raised {error!r}" if error else CLOSED)


def check_divisible(full: Tensor, size: int, label: Label) -> Tensor:
    """``full``, detached; ``ConfigError`` if it is not ``[size * n]``, or not contiguous."""
    if full.ndim != 1 or full.numel() % size or not full.is_contiguous():
        raise ConfigError(
            f"{label}: a buffer of shape {tuple(full.shape)} with strides {full.stride()} cannot "
            f"be split into {size} equal, contiguous pieces. Flatten it, and pad it to a multiple "
            f"of {size}."
        )
    return full.detach() if full.requires_grad else full


def rows_of(full: Tensor, size: int) -> Tensor:
    """``[size * n]`` as ``[size, n]``: one row for each rank."""
    return full.view(size, full.numel() // size)
