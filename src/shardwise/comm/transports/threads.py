"""Ranks as threads of one process, for tests and debugging: no launcher, real collectives.

A collective is executed by the thread of the last rank that issues it, with memory copies that
neither autograd nor a dispatch mode sees. So ranks need not wait in any order, and a mismatched
collective is found when it is issued. Processes would take seconds per test to start.

CPU only. Random generators are shared by all ranks, so dropout differs from that of processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread, get_ident
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.messages import MessagesComm
from shardwise.comm.transports.transport import Shutdown, axis_name, ranks_of_axes
from shardwise.comm.watchdog.call_site import user_call
from shardwise.comm.watchdog.desync import Collective, format_ranks, mismatch, rank_left, timed_out
from shardwise.errors import RanksDisagree

T = TypeVar("T")


def run(world: int, fn: Callable[[Comm], T], timeout: float = 60.0) -> list[T]:
    """Run ``fn(comm)`` on ``world`` ranks, each a thread, and return their results by rank.

    Args:
        world: number of ranks; with 1 the comm is a ``LocalComm`` and ``fn`` still has a thread.
        timeout: seconds that a rank waits for another, and that this call waits for all.

    Raises:
        Exception: the first error of a rank that was not caused by another rank.
        RanksDisagree: ranks issued different collectives, or did not end in time.
    """
    rendezvous = _Rendezvous(world, timeout)
    results: dict[int, T] = {}
    threads = [
        Thread(target=_run_rank, args=(rank, fn, rendezvous, results), name=f"rank-{rank}")
        for rank in range(world)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    deadline = monotonic() + timeout + 1.0  # a rank that waits for another raises first
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    if error := rendezvous.first_error():
        raise error
    if running := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        raise RanksDisagree(
            f"{format_ranks(running)} did not end within {timeout:,.0f} s, outside of collectives. "
            "The thread still runs. Look for an endless loop or a lock, or raise the timeout."
        )
    return [results[rank] for rank in range(world)]


def _run_rank(
    rank: int, fn: Callable[[Comm], T], rendezvous: _Rendezvous, results: dict[int, T]
) -> None:
    """Run one rank in its thread; it always reports its end to the rendezvous."""
    comm = LocalComm() if rendezvous.size == 1 else _ThreadsComm(rank, rendezvous)
    try:
        results[rank] = fn(comm)
    except BaseException as error:  # noqa: BLE001 - `run` raises it in the caller's thread
        rendezvous.leave(rank, f"it raised {error!r}", error)
    else:
        rendezvous.leave(rank, "its thread ended normally")


@dataclass
class _Contribution:
    """One rank's part of a collective."""

    collective: Collective
    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]
    text: str = ""
    thread: int = field(default_factory=get_ident)


class _Rendezvous:
    """The shared state of all ranks, guarded by one lock."""

    def __init__(self, size: int, timeout: float, where: str = "") -> None:
        self.size, self._where = size, where
        self.timeout = timeout
        self._changed = Condition()
        self._contributions: dict[int, dict[int, _Contribution]] = {}  # by collective, then by rank
        self._issued = dict.fromkeys(range(size), 0)
        self._last_common = ""  # the last collective that every rank issued
        self._ended: dict[int, str] = {}
        self._errors: list[BaseException] = []
        self._failure = ""
        self._axes: dict[tuple[int, ...], _Rendezvous] = {}

    def axis(self, name: str, ranks: tuple[int, ...]) -> _Rendezvous:
        """The rendezvous of some of the ranks."""
        new = _Rendezvous(len(ranks), self.timeout, axis_name(name, ranks))
        with self._changed:
            ended = {ranks.index(r): why for r, why in self._ended.items() if r in ranks}
            new._ended.update(ended)
            return self._axes.setdefault(ranks, new)

    def post(self, rank: int, own: _Contribution) -> dict[int, _Contribution]:
        """Add ``own`` to a collective; returns the contributions of all ranks, as they come."""
        with self._changed:
            self._raise_if_failed()
            seq = own.collective.seq
            by_rank = self._contributions.setdefault(seq, {})
            issued = {peer: other.collective for peer, other in by_rank.items()}
            issued[rank] = own.collective
            if len(set(issued.values())) > 1:
                calls = {r: user_call(one.thread) for r, one in {**by_rank, rank: own}.items()}
                raise self.fail(mismatch(issued, self._last_common, calls))
            by_rank[rank] = own
            self._issued[rank] += 1
            if len(by_rank) == self.size:
                _deliver(self._contributions.pop(seq))
                self._last_common = str(own.collective)
                self._changed.notify_all()
            return by_rank

    def wait(self, rank: int, by_rank: dict[int, _Contribution]) -> None:
        """Wait until every rank has contributed."""
        deadline = monotonic() + self.timeout
        with self._changed:
            while len(by_rank) < self.size:
                self._raise_if_failed()
                waiting = {rank: by_rank[rank].collective}
                missing = [r for r in range(self.size) if r not in by_rank]
                for peer in (r for r in missing if r in self._ended):
                    raise self.fail(rank_left(peer, self._ended[peer], self._issued[peer], waiting))
                if not self._changed.wait(deadline - monotonic()):
                    raise self.fail(timed_out(missing, self.timeout, waiting))

    def leave(self, rank: int, reason: str, error: BaseException | None = None) -> None:
        with self._changed:
            self._ended.setdefault(rank, reason)
            if error is not None:
                self._errors.append(error)
            self._changed.notify_all()
            axes = [(of.index(rank), axis) for of, axis in self._axes.items() if rank in of]
        for number, axis in axes:
            axis.leave(number, reason, None)

    def first_error(self) -> BaseException | None:
        with self._changed:
            own = [e for e in self._errors if not isinstance(e, RanksDisagree)]
            return next(iter(own + self._errors), None)

    def _raise_if_failed(self) -> None:
        if self._failure:
            raise RanksDisagree(self._where + self._failure)

    def fail(self, reason: str) -> RanksDisagree:
        with self._changed:  # reentrant
            self._failure = self._failure or reason
            self._changed.notify_all()
            return RanksDisagree(self._where + self._failure)


class _ThreadsComm(MessagesComm):
    """One thread's communicator. Final; see ``Comm``."""

    def __init__(self, rank: int, rendezvous: _Rendezvous) -> None:
        shutdown = Shutdown(open_axes=partial(_open_axes, rank, rendezvous))
        super().__init__(rank, rendezvous.size, torch.device("cpu"), shutdown)
        self._rendezvous = rendezvous

    def _post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        by_rank = self._rendezvous.post(self.rank, _Contribution(collective, sends, receives))
        return lambda: self._rendezvous.wait(self.rank, by_rank)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        by_rank = self._rendezvous.post(self.rank, _Contribution(collective, {}, {}, text))
        self._rendezvous.wait(self.rank, by_rank)
        return [by_rank[rank].text for rank in range(self.size)]

    def _fail(self, reason: str) -> RanksDisagree:
        return self._rendezvous.fail(reason)

    def _leave(self, reason: str) -> None:
        self._rendezvous.leave(self.rank, reason)


def _deliver(by_rank: Mapping[int, _Contribution]) -> None:
    for rank, own in by_rank.items():
        for source, place in own.receives.items():
            data = by_rank[source].sends[rank]
            ctypes.memmove(place.data_ptr(), data.data_ptr(), data.nbytes)


def _open_axes(rank: int, rendezvous: _Rendezvous, replicate: int, shard: int) -> tuple[Comm, Comm]:
    def axis(name: str, ranks: Sequence[int]) -> Comm:
        if len(ranks) == 1:
            return LocalComm()
        return _ThreadsComm(ranks.index(rank), rendezvous.axis(name, tuple(ranks)))

    along_replicate, along_shard = ranks_of_axes(rank, replicate, shard)
    return axis(*along_replicate), axis(*along_shard)
