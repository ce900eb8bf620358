"""Base class of transports between real ranks: numbering, counters, agreement and shutdown.

A transport is a subclass that moves bytes and reports failed peers, in a few short methods. What
it starts is a ``Transfer``: two functions, the first of which waits for the bytes.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.pages import pages
from shardwise.comm.protocol import (
    CLOSED,
    Comm,
    Counters,
    Label,
    OnReceived,
    Pending,
    Sizes,
    check_divisible,
)
from shardwise.comm.watchdog.desync import Collective, facts_differ
from shardwise.comm.watchdog.watchdog import Watchdog, process_exit_reason
from shardwise.errors import ConfigError, RanksDisagree


def noop() -> None:
    """Do nothing."""


class Transfer(NamedTuple):
    """A transfer in flight."""

    complete: Callable[[], None]  # waits for it, or raises RanksDisagree
    finish: Callable[[], None] = noop  # called once after ``complete``


OpenAxes = Callable[[int, int], tuple[Comm, Comm]]
"""From the shape of a grid to this rank's two axes; see ``Comm.axes``."""


def ranks_of_axes(rank: int, replicate: int, shard: int) -> list[tuple[str, range]]:
    """The names of the axes of a grid, and the ranks that ``rank`` is with on each."""
    row, column = divmod(rank, shard)
    in_row = range(row * shard, (row + 1) * shard)
    return [("replicate", range(column, replicate * shard, shard)), ("shard", in_row)]


def axis_name(axis: str, ranks: Sequence[int]) -> str:
    """Name an axis in messages; its ranks are numbered from 0."""
    return f"on the {axis} axis, whose ranks 0 to {len(ranks) - 1} are {list(ranks)} of all: "


def _without_axes(replicate: int, shard: int) -> tuple[Comm, Comm]:
    raise ConfigError(
        f"this communicator cannot be made a grid of {replicate} × {shard} ranks, since it is not "
        "one of all processes. Pass mesh= with a DeviceMesh of two axes."
    )


class Shutdown(NamedTuple):
    """The end of a communicator: with the run, or with the larger group that it belongs to."""

    # Seconds to wait, at most, for all ranks to close. For the rank that serves the store, from
    # which the others read why it closed.
    linger: float = 0.0
    callback: Callable[[], None] = noop  # called last
    where: str = ""  # which axis of a grid it is, for messages
    open_axes: OpenAxes = _without_axes  # makes the axes of a grid of its ranks
    failure: Callable[[], str] = str  # why a rank gave up while all connected, or ""


IMMEDIATE = Shutdown()


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroy it, unless the program has: ``dist.destroy_process_group()`` ends every group."""
    with suppress(ValueError):
        dist.destroy_process_group(group)


_numbers = itertools.count()
_open: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()  # oldest first


def _close_all() -> None:
    """Close what is open at the process's end, the newest first: the oldest may serve the store."""
    for number in sorted(_open, reverse=True):
        if (group := _open.get(number)) is not None and group._process == os.getpid():
            group.close(process_exit_reason())


class Group(Comm):
    """One rank's communicator in a group of real ranks. A subclass moves the bytes.

    Subclasses have a ``store`` that no other group uses, and a ``timeout``: the seconds after which
    waiting for a slow rank raises.
    """

    _watchdog: Watchdog  # of ranks that are processes
    #: Where a wait stops this rank until others have issued what it waits for.
    watched: Watchdog | None = None
    #: Does it close when nobody uses it any more? That is at another time on every rank.
    closes_unused = True
    _process: int | None = None  # that has opened it; a fork closes nothing of its parent's

    def __init__(
        self, rank: int, size: int, device: torch.device, shutdown: Shutdown = IMMEDIATE
    ) -> None:
        super().__init__(rank, size, device)
        self.shutdown = shutdown
        # Each rank starts with its successor, so that no rank is the first peer of all.
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._issued = 0
        self._closed = False
        self._axes: dict[tuple[int, int], tuple[Comm, Comm]] = {}

    @property
    def is_usable(self) -> bool:
        return not (self._closed or (self.watched and self.watched.failure))

    # ---- implemented by transports -----------------------------------------------------------

    @abstractmethod
    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        """Fill ``full``, ``[size * n]``, which holds this rank's piece."""

    @abstractmethod
    def _exchange(
        self, collective: Collective, full: Tensor, on_received: OnReceived, out: Tensor | None
    ) -> Transfer:
        """Send piece r to rank r; ``finish`` passes the received pieces to ``on_received``."""

    @abstractmethod
    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        """Copy ``root``'s ``data``, flat and contiguous, to every rank."""

    @abstractmethod
    def _all_to_all(
        self, collective: Collective, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Transfer:
        """Send pieces of ``sent`` and fill ``received``; one piece is this rank's own."""

    @abstractmethod
    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        """Every rank's ``text``, by rank, outside the data path."""

    def _fail(self, reason: str) -> RanksDisagree:
        """Make the group unusable on all ranks, and return the error to raise."""
        return self._watchdog.fail(reason)

    @abstractmethod
    def _leave(self, reason: str) -> None:
        """Report ``reason`` to the other ranks, and release resources. Called once."""

    # ---- collectives -------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        full = check_divisible(full, self.size, label)
        collective = self._next("all_gather", label, full.nbytes)
        transfer = self._all_gather(collective, full)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def exchange(
        self, full: Tensor, on_received: OnReceived, label: Label, out: Tensor | None = None
    ) -> Pending:
        full = full if full.ndim == 2 else check_divisible(full, self.size, label)
        collective = self._next("reduce_scatter", label, full.nbytes)
        transfer = self._exchange(collective, full, on_received, out)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        data = tensor.detach().view(-1)
        collective = self._next(f"broadcast from rank {root}", label, data.nbytes)
        transfer = self._broadcast(collective, data, root)
        sent = (self.size - 1) * data.nbytes if self.rank == root else 0
        return self._in_flight(collective, transfer, sent)

    def all_to_all(self, sent: Tensor, sizes: Sizes, label: Label) -> Tensor:
        received = self.memory.gradient(sum(row[self.rank] for row in sizes), sent.dtype)
        nbytes = sum(map(sum, sizes)) * sent.itemsize
        collective = self._next("all_to_all", label, nbytes)
        transfer = self._all_to_all(collective, sent, received, sizes)
        own = sizes[self.rank][self.rank] * sent.itemsize
        self._in_flight(collective, transfer, sent.nbytes - own).wait()
        return received

    def agree(self, facts: Mapping[str, str]) -> None:
        """Digests first: ranks that agree read 64 bytes per rank instead of all facts."""
        own = json.dumps(dict(facts), sort_keys=True)
        digests = self._texts(hashlib.sha256(own.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise self._fail(facts_differ([json.loads(text) for text in self._texts(own)]))
        for axis in itertools.chain(*self._axes.values()):
            axis.agree(facts)  # which also frees memory that the axis shares
        pages.trim()

    def fence(self, label: Label) -> None:
        for axis in itertools.chain(*self._axes.values()):
            axis.fence(label)

    def _texts(self, text: str) -> list[str]:
        return self._gather_texts(self._next("agree", Label("agree"), 0), text)

    def _next(self, kind: str, label: Label, nbytes: int) -> Collective:
        self._issued += 1
        return Collective(self._issued - 1, kind, label.op, label.unit, nbytes)

    def _in_flight(self, collective: Collective, transfer: Transfer, sent: int) -> InFlight:
        self.counters.sent(collective.op, sent)
        return InFlight(transfer, self.counters, collective.op)

    def axes(self, replicate: int, shard: int) -> tuple[Comm, Comm]:
        shape = replicate, shard
        if shape not in self._axes:
            self._axes[shape] = self.shutdown.open_axes(replicate, shard)
        return self._axes[shape]

    # ---- close -------------------------------------------------------------------------------

    def close(self, reason: str = CLOSED) -> None:
        if self._closed:
            return
        self._closed = True
        for axis in itertools.chain(*self._axes.values()):
            axis.close(reason)
        self._leave(reason)
        self.shutdown.callback()

    def _opened(self) -> None:
        """All ranks are connected: this end closes when nobody uses it, or the process ends."""
        _open[next(_numbers)] = self
        atexit.unregister(_close_all)  # it is called once
        atexit.register(_close_all)  # here, since Python 3.13 forgets in a fork what was there
        self._process = os.getpid()

    def __del__(self) -> None:
        if self.closes_unused and self._process == os.getpid():
            self.shutdown = IMMEDIATE  # if it made a group, that was destroyed: see ``comm_for``
            self.close("nobody used it any more")


class InFlight:
    """A collective of a group in flight. Final; see ``Pending``."""

    __slots__ = ("__weakref__", "_counters", "_op", "_transfer")

    def __init__(self, transfer: Transfer, counters: Counters, op: str) -> None:
        self._transfer: Transfer | None = transfer
        self._counters = counters
        self._op = op

    def wait(self) -> None:  # again: returns at once, or raises the same error
        if self._transfer is None:
            return
        start = perf_counter()
        self._transfer.complete()
        self._counters.waited(self._op, perf_counter() - start)
        self._transfer.finish()
        self._transfer = None  # releases the memory
