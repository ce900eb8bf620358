"""Communicator over ``torch.distributed``'s gloo, by tagged point-to-point messages.

The tag is a hash of the collective, so messages of different collectives never match. gloo's own
collectives, when mismatched, truncate silently, deliver the bytes of another unit, or abort the
process. The process group is used by this comm only, so tags never match a user's. Messages are
received into their final memory: 2–4 times as fast as gloo's own collectives, which copy a gather
through a second buffer and send a reduce-scatter as an all-reduce.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.comm.machine.meeting import new_client
from shardwise.comm.transports.messages import MessagesComm
from shardwise.comm.transports.transport import IMMEDIATE, Shutdown
from shardwise.comm.watchdog.desync import NO_TAG, PROBE_TAG, Collective
from shardwise.comm.watchdog.waits_in_cpp import WaitsInCpp
from shardwise.comm.watchdog.watchdog import Wait, Watchdog, weakly

IMMEDIATELY = timedelta(milliseconds=1)
LONG = 256 << 10  # bytes of a collective from which a message may come in parts
LAST_MESSAGES = timedelta(seconds=5)  # a rank that leaves waits so long for what it has sent


class GlooComm(MessagesComm):
    """One rank's communicator over gloo. Final; see ``Group``."""

    def __init__(
        self, rank: int, size: int, store: Store, timeout: float, shutdown: Shutdown = IMMEDIATE
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), shutdown)
        # Kept even if nobody waits: a peer's message needs its buffer.
        self._works: dict[int, list[tuple[int, Work]]] = {}
        self._group: Any = None  # torch has no types for ``send`` and ``recv``
        self._watchdog = Watchdog(
            store, rank, size, weakly(self._interrupt), timeout, shutdown.where, shutdown.failure
        )
        self.watched = self._watchdog
        with self._watchdog.meeting():
            self._watchdog.greet("start")  # names missing ranks, which gloo does not
            self._watchdog.greet("connection", rendezvous=lambda: self._connect(store, timeout))
            # Otherwise a rank could close while a peer still connects.
            self._watchdog.greet("end of connection")
        self._opened()

    def _connect(self, store: Store, timeout: float) -> None:
        limit = timedelta(seconds=timeout + 60)  # so that the watchdog can report first
        # A client of its own, or the watchdog would wait behind what gloo waits for.
        own = PrefixStore("gloo/", new_client(store))
        new_group = partial(ProcessGroupGloo, own, self.rank, self.size, limit)
        in_batch = partial(_in_batch_class, new_group)
        self._group = self._waits.carry_out(in_batch, self._watchdog.raise_if_failed, 0.05)
        self._watchdog.is_closed = partial(is_closed, self._group)

    def _post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        self._watchdog.issue(collective)
        group, tag = self._group, collective.tag
        works = self._works[collective.seq] = []
        peer: int | None = None
        try:
            # Receives first: a message whose buffer is known is sent without a handshake.
            for peer, buffer in receives.items():
                works.append((peer, group.recv([buffer], peer, tag)))
            for peer, data in sends.items():
                works.append((peer, group.send([data], peer, tag)))
        except RuntimeError as error:
            raise self._watchdog.explain(error, peer) from error
        return lambda: self._complete(collective)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        # With a message to each peer: a connection reports a dead peer, the store does not.
        full = torch.empty(self.size)

        def exchange_messages() -> None:
            self._all_gather(collective, full).complete()

        return self._watchdog.gather_texts(collective, text, exchange_messages)

    def _leave(self, reason: str) -> None:
        failed = bool(self._watchdog.failure)
        self._watchdog.leave(reason, self.shutdown.linger)
        for _, work in chain(*self._works.values()) if not failed else ():
            with suppress(RuntimeError):  # a wait that ends without success closes connections
                work.wait(LAST_MESSAGES)
        self._interrupt()  # otherwise transfers in flight would write into freed memory
        self._group = None

    def _complete(self, collective: Collective) -> None:
        if collective.nbytes < LONG or self._watchdog.failure:
            self._wait(collective)
        else:  # once for all its messages: another thread wakes up late
            wait = partial(self._wait, collective)
            self._waits.carry_out(wait, self._watchdog.raise_if_failed)
        self._watchdog.waits = None
        del self._works[collective.seq]

    def _wait(self, collective: Collective) -> None:
        since = monotonic()
        for peer, work in self._works[collective.seq]:
            self._watchdog.waits = Wait(collective, since, peer)
            try:
                work.wait(IMMEDIATELY) if self._watchdog.failure else work.wait()
            except RuntimeError as error:
                raise self._watchdog.explain(error, peer) from error

    @cached_property
    def _waits(self) -> WaitsInCpp:
        return WaitsInCpp()

    def _interrupt(self) -> None:
        if self._group is not None:
            close_connections(self._group, self.peers[0])


def _in_batch_class(new_group: Callable[[], Any]) -> Any:
    """Make a group whose threads take no core from a thread that computes.

    gloo's thread polls while a connection is locked. Where it has taken the core of the thread that
    has locked it, neither gets on until a time slice ends, after some 4 ms. A thread of the class
    SCHED_BATCH (sched(7)) waits for a free core, or for its turn. Threads inherit their class.
    """
    if platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return new_group()
    _schedule_as(os.SCHED_BATCH)
    group = new_group()
    _schedule_as(os.SCHED_OTHER)
    return group


def _schedule_as(policy: int) -> None:
    """Put this thread into a class of the kernel's scheduler, unless a sandbox forbids it."""
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))


def close_connections(group: Any, peer: int) -> None:
    """Make every pending operation of this rank in a gloo group fail, on any thread.

    gloo has no function for this (``abort`` does not wake a waiting thread). But an operation that
    times out closes all connections of its group, and this receive can only time out.
    """
    with suppress(RuntimeError):
        buffer = torch.empty(1)
        group.recv([buffer], peer, NO_TAG).wait(IMMEDIATELY)


def is_closed(group: Any, peer: int) -> bool:
    """Is the connection to ``peer`` closed? Nobody receives the message that shows it.

    When it closes, gloo fails messages that have not begun, and leaves one that has to its timeout.
    """
    try:
        group.send([torch.empty(1)], peer, PROBE_TAG)
    except RuntimeError:
        return True
    return False
