"""What every transport between real ranks has in common: numbers, counters, agreement, an end.

A transport is a subclass that moves bytes and says what became of its peers: a few short methods
(``threads`` is one of about forty lines). What it starts is a ``Transfer``: two calls, the first
of which returns when the bytes are there.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.desync import Collective, facts_differ
from shardwise.comm.protocol import Comm, Counters, Label, Pending, Use, splits
from shardwise.comm.watchdog import how_this_process_ends
from shardwise.errors import RanksDisagree

__all__ = ["Ending", "Group", "InFlight", "Transfer"]

CLOSED = "it closed its end of the group"


def nothing() -> None:
    """There is nothing to do."""


class Transfer(NamedTuple):
    """Bytes on their way.

    Attributes:
        complete: returns when they are there, or raises ``RanksDisagree``.
        finish: called once after it.
    """

    complete: Callable[[], None]
    finish: Callable[[], None] = nothing


@dataclass(frozen=True)
class Ending:
    """What else ends with one rank's end of a group.

    Attributes:
        linger: seconds to stay, at most, until every rank has left: for the rank that serves
            the store, in which the others read why it left.
        then: called last.
    """

    linger: float = 0.0
    then: Callable[[], None] = nothing


class Group(Comm):
    """One rank's end of a group of real ranks. A subclass moves the bytes."""

    def __init__(
        self, rank: int, size: int, device: torch.device, ending: Ending | None = None
    ) -> None:
        super().__init__(rank, size, device)
        self.ending = ending or Ending()
        # Each rank begins with its successor, so that no rank is everybody's first.
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._issued = 0
        self._closed = False

    # ---- what a transport does ---------------------------------------------------------------

    @abstractmethod
    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        """Fill ``full``, ``[size * n]``, of which this rank's piece is there."""

    @abstractmethod
    def _exchange(self, collective: Collective, full: Tensor, use: Use) -> Transfer:
        """Send piece r to rank r; ``finish`` calls ``use`` with what every rank sent here."""

    @abstractmethod
    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        """Copy ``root``'s ``data``, flat and contiguous, to every rank."""

    @abstractmethod
    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        """Every rank's ``text``, by rank, outside the data path."""

    @abstractmethod
    def _fail(self, reason: str) -> RanksDisagree:
        """Make the group unusable for everybody, and return the error to raise."""

    @abstractmethod
    def _leave(self, how: str) -> None:
        """Tell the others how this rank ends, and release what was opened. Called once."""

    # ---- collectives -------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        full = splits(full, self.size, label)
        collective = self._next("all_gather", label, full.nbytes)
        transfer = self._all_gather(collective, full)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def exchange(self, full: Tensor, use: Use, label: Label) -> Pending:
        full = splits(full, self.size, label)
        collective = self._next("reduce_scatter", label, full.nbytes)
        transfer = self._exchange(collective, full, use)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        data = tensor.detach().view(-1)
        collective = self._next(f"broadcast from rank {root}", label, data.nbytes)
        transfer = self._broadcast(collective, data, root)
        sent = (self.size - 1) * data.nbytes if self.rank == root else 0
        return self._in_flight(collective, transfer, sent)

    def agree(self, facts: Mapping[str, str]) -> None:
        """Digests first: N ranks that agree then read 64 N bytes each and not N times the facts."""
        mine = json.dumps(dict(facts), sort_keys=True)
        digests = self._texts(hashlib.sha256(mine.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise self._fail(facts_differ([json.loads(text) for text in self._texts(mine)]))

    def _texts(self, text: str) -> list[str]:
        return self._gather_texts(self._next("agree", Label("agree"), 0), text)

    def _next(self, kind: str, label: Label, nbytes: int) -> Collective:
        self._issued += 1
        return Collective(self._issued - 1, kind, label.op, label.unit, nbytes)

    def _in_flight(self, collective: Collective, transfer: Transfer, sent: int) -> InFlight:
        self.counters.sent(collective.op, sent)
        return InFlight(transfer, self.counters, collective.op)

    # ---- its end -----------------------------------------------------------------------------

    def close(self) -> None:
        self._end(CLOSED)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(f"it raised {error!r}" if error else CLOSED)

    def _end(self, how: str) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end_with_process)
        self._leave(how)
        self.ending.then()

    def _end_with_process(self) -> None:
        self._end(how_this_process_ends())


class InFlight:
    """A collective of a group in flight. Final; see ``Pending``."""

    __slots__ = ("__weakref__", "_counters", "_op", "_transfer")

    def __init__(self, transfer: Transfer, counters: Counters, op: str) -> None:
        self._transfer: Transfer | None = transfer
        self._counters = counters
        self._op = op

    def wait(self) -> None:
        """See ``Pending``. Waiting again is free, or the same error again."""
        if self._transfer is None:
            return
        start = perf_counter()
        self._transfer.complete()
        self._counters.waited(self._op, perf_counter() - start)
        self._transfer.finish()
        self._transfer = None  # lets go of the memory
