"""Communicator of ranks of one host that map the same memory: a gather moves no bytes.

    common     | bucket 0: shard 0, shard 1 | bucket 1 …      mapped by every rank; each writes its
               |                            |                 own shards, all read everything
    own        | gradient bucket | …                          each rank's, read by the others

Over sockets every rank has a copy of a gathered bucket. Here a bucket exists once per host, a
shard is a slice of it, and a gather only waits until every rank has finished its update. In a
reduction each rank sums its slice of the W gradient buckets in rank order, so results are the same
bits as over gloo. Each rank publishes a collective as a row of four numbers; ranks with different
collectives wait for each other, and the watchdog finds them.

    row of rank r, collective n (mod ROWS):  n + 1 | tag | offset of its piece | n + 1 once read
"""

from __future__ import annotations

import json
import os
import platform
import select
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.comm.memory import SharedMemory
from shardwise.comm.protocol import Label, OnReceived, Pending, Sizes, rows_of
from shardwise.comm.transports.arena import PAGE, Arena, Heap, SymmetricHeap
from shardwise.comm.transports.transport import IMMEDIATE, Group, InFlight, Shutdown, Transfer, noop
from shardwise.comm.watchdog.desync import Collective
from shardwise.comm.watchdog.watchdog import Wait, Watchdog

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Missing = Callable[[], int | None]  # a peer that is waited for

ROWS = 1024  # most collectives in flight: a rank that issues more first completes its oldest
YIELDS = 100  # polls with sched_yield before a rank sleeps between polls
SLEEP, MAX_SLEEP = 20e-6, 1e-3  # seconds


def shared_memory(
    store: Store, rank: int, size: int, timeout: float, shutdown: Shutdown = IMMEDIATE
) -> SharedMemoryComm | None:
    """A comm over shared memory, or ``None`` on every rank if the ranks cannot share memory."""
    abort_flag: list[Numbers] = []  # empty until the ranks are connected

    def interrupt() -> None:
        for word in abort_flag:
            word[0] = 1

    store = PrefixStore("memory/", store)
    watchdog = Watchdog(store, rank, size, interrupt, timeout, shutdown.where, shutdown.failure)
    with watchdog.meeting():
        arenas, pids = _open_everywhere(watchdog, rank)
        if arenas is None:
            watchdog.leave("the ranks cannot share memory")
            return None
        comm = SharedMemoryComm(rank, size, watchdog, arenas, pids, shutdown)
    abort_flag.append(comm.abort_flag)
    return comm


def _open_everywhere(watchdog: Watchdog, rank: int) -> tuple[list[Arena] | None, list[int]]:
    """The arenas of all ranks, or ``None`` if a rank could not open them all; and the pids."""
    kinds = ("own", "common") if rank == 0 else ("own",)
    arenas = [Arena.create(_bytes_for(watchdog.size)) for _ in kinds] if _is_supported() else []
    own = json.dumps([proc_namespace(), os.getpid(), [arena.fd for arena in arenas]])
    startups = [json.loads(text) for text in watchdog.greet("start", own)]
    hosts = {host for host, _, _ in startups}
    opened = _open(startups, rank, arenas) if len(hosts) == 1 else None
    all_opened = set(watchdog.greet("start", str(opened is not None))) == {"True"}
    for arena in arenas:
        arena.close_file()
    return opened if all_opened else None, [pid for _, pid, _ in startups]


def _bytes_for(ranks: int) -> int:
    """Address space of one arena of so many: 5 TiB in all, of the 128 that a process has."""
    return min(1 << 40, (1 << 42) // ranks)


def _is_supported() -> bool:
    """Plain loads and stores suffice only if the processor keeps their order."""
    return platform.machine() in ("x86_64", "AMD64") and platform.system() == "Linux"


def proc_namespace() -> str:
    """A text that is equal for processes that see each other in ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # unique


def _open(
    startups: list[tuple[str, int, list[int]]], rank: int, created: list[Arena]
) -> list[Arena] | None:
    """The common arena, then every rank's own; ``None`` if one cannot be opened."""
    try:
        common = created[1] if rank == 0 else Arena.open(startups[0][1], startups[0][2][1])
        own = [
            created[0] if peer == rank else Arena.open(pid, fds[0])
            for peer, (_, pid, fds) in enumerate(startups)
        ]
    except (OSError, IndexError, ValueError):
        return None
    return [common, *own]


class SharedMemoryComm(Group):
    """One rank's communicator in a group on one host. Final; see ``Group``.

    Args:
        arenas: the common one, then each rank's own.
        pids: of the ranks' processes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        watchdog: Watchdog,
        arenas: list[Arena],
        pids: list[int],
        shutdown: Shutdown,
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), shutdown)
        self._watchdog = self.watched = watchdog
        self._common, *self._own = arenas
        rows: Numbers = self._common.tensor(0, size * ROWS * 4, torch.int64).numpy()
        self._rows = rows.reshape(size, ROWS, 4)
        self.abort_flag: Numbers = self._common.tensor(rows.nbytes, 1, torch.int64).numpy()
        self._own_heap = Heap(self._own[rank], lambda number: self._unread_peer(number) is not None)
        self._common_heap = SymmetricHeap(self._common, rows.nbytes + PAGE)
        self.memory = SharedMemory(self._own_heap, self._common_heap)
        self._first_used = ROWS  # the first collective whose row may still be in use
        self._pending: list[weakref.ref[InFlight] | None] = [None] * ROWS  # by row
        self._pidfds = [os.pidfd_open(pid) for pid in pids]
        self._opened()

    # ---- collectives -----------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        if self._common.offset_of(full) is None:
            return super().all_gather(full, label)
        return self._barrier("all_gather", label, full.nbytes)  # the same memory on every rank

    def fence(self, label: Label) -> None:
        """Wait for all ranks, so that none still reads what another writes next."""
        self._barrier("fence", label, 0).wait()

    def _barrier(self, kind: str, label: Label, nbytes: int) -> Pending:
        """A collective that moves nothing."""
        collective = self._next(kind, label, nbytes)
        self._post(collective)
        return self._in_flight(collective, self._transfer(collective, noop), 0)

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        rows = rows_of(full, self.size)
        self._publish(rows[self.rank], collective)

        def finish() -> None:
            with torch.no_grad():
                for peer in self.peers:
                    rows[peer].copy_(self._piece(peer, collective, rows[peer], 0))

        return self._transfer(collective, finish)

    def _exchange(
        self, collective: Collective, full: Tensor, on_received: OnReceived, out: Tensor | None
    ) -> Transfer:
        own = self._publish(full, collective)

        def finish() -> None:
            pieces = list(rows_of(own, self.size).unbind())
            start = self.rank * pieces[self.rank].nbytes
            for peer in self.peers:
                pieces[peer] = self._piece(peer, collective, pieces[peer], start)
            on_received(pieces)

        return self._transfer(collective, finish)

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        if self.rank == root:
            self._publish(data, collective)
        else:
            self._post(collective)

        def finish() -> None:
            if self.rank != root:
                with torch.no_grad():
                    data.copy_(self._piece(root, collective, data, 0))

        return self._transfer(collective, finish)

    def _all_to_all(
        self, collective: Collective, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Transfer:
        self._publish(sent, collective)

        def finish() -> None:
            places = received.split([row[self.rank] for row in sizes])
            places[self.rank].copy_(sent.split(list(sizes[self.rank]))[self.rank])
            for peer in self.peers:
                if places[peer].numel():
                    start = sum(sizes[peer][: self.rank]) * sent.itemsize
                    places[peer].copy_(self._piece(peer, collective, places[peer], start))

        return self._transfer(collective, finish)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        """Every rank's ``text``; also frees memory that no rank uses any more."""
        self._post(collective)
        own = json.dumps([text, sorted(self._common_heap.unused)])
        texts = self._watchdog.gather_texts(collective, own, is_gone=self._is_gone)
        self._mark_read(collective)
        pairs = [json.loads(pair) for pair in texts]
        self._common_heap.reuse(set.intersection(*(set(unused) for _, unused in pairs)))
        self._own_heap.trim()
        return [text for text, _ in pairs]

    def _leave(self, reason: str) -> None:
        self._watchdog.leave(reason, self.shutdown.linger)
        for descriptor in self._pidfds:
            os.close(descriptor)

    # ---- rows ------------------------------------------------------------------------------

    def _post(self, collective: Collective, offset: int = 0) -> None:
        self._watchdog.issue(collective)
        if collective.seq >= self._first_used:
            self._free_row(collective)
        row = self._rows[self.rank, collective.seq % ROWS]
        row[1], row[2] = collective.tag, offset
        row[0] = collective.seq + 1  # last: a rank that sees it sees the others

    def _free_row(self, collective: Collective) -> None:
        """Wait until the previous collective in the row of ``collective`` is complete on all ranks.

        This rank completes its own oldest collective, and waits for ranks that still read the row.
        """
        number, row = collective.seq - ROWS, collective.seq % ROWS
        if self._rows[self.rank, row, 3] < number + 1:
            reference = self._pending[row]
            if pending := reference and reference():
                pending.wait()
            self._rows[self.rank, row, 3] = number + 1  # also if it was dropped without a wait
        self._wait_until(collective, partial(self._unread_peer, number))
        read = np.roll(self._rows[:, :, 3].min(axis=0), -row)  # [ROWS], from this row on
        in_use = np.flatnonzero(read < np.arange(number, number + ROWS) + 1)
        self._first_used = collective.seq + int(in_use[0] if len(in_use) else ROWS)

    def _publish(self, data: Tensor, collective: Collective) -> Tensor:
        """Publish ``data`` to the peers, in place if it lies in our arena, else as a copy."""
        if data.numel() == 0:
            self._post(collective)
            return data
        arena = self._own[self.rank]
        offset = arena.offset_of(data)
        if offset is None:
            copy = self._own_heap.allocate(data.numel(), data.dtype).copy_(data)
            data, offset = copy, arena.offset_of(copy) or 0
        self._own_heap.mark_read_in(offset, collective.seq)
        self._post(collective, offset)
        return data

    def _piece(self, peer: int, collective: Collective, shape: Tensor, start: int) -> Tensor:
        """A piece, like ``shape``, of what ``peer`` published: from byte ``start`` on."""
        start += int(self._rows[peer, collective.seq % ROWS, 2])
        return self._own[peer].tensor(start, shape.numel(), shape.dtype)

    def _mark_read(self, collective: Collective) -> None:
        self._rows[self.rank, collective.seq % ROWS, 3] = collective.seq + 1

    def _unread_peer(self, number: int) -> int | None:
        """A peer that has not read this rank's data of collective ``number``, or ``None``."""
        rows = self._rows[:, number % ROWS, 3]
        return next((peer for peer in self.peers if rows[peer] < number + 1), None)

    def _missing_peer(self, collective: Collective) -> int | None:
        """A peer that has not issued ``collective``, or ``None``."""
        number, tag, row = collective.seq + 1, collective.tag, collective.seq % ROWS
        for peer in self.peers:
            peer_row = self._rows[peer, row]
            if peer_row[0] < number or peer_row[1] != tag:
                return peer
        return None

    # ---- waiting ---------------------------------------------------------------------------

    def _transfer(self, collective: Collective, finish: Callable[[], None]) -> Transfer:
        def finish_and_mark_read() -> None:
            finish()
            self._mark_read(collective)

        missing = partial(self._missing_peer, collective)
        return Transfer(partial(self._wait_until, collective, missing), finish_and_mark_read)

    def _in_flight(self, collective: Collective, transfer: Transfer, sent: int) -> InFlight:
        pending = super()._in_flight(collective, transfer, sent)
        self._pending[collective.seq % ROWS] = weakref.ref(pending)
        return pending

    def _wait_until(self, collective: Collective, missing: Missing) -> None:
        """Wait in ``collective`` until no peer is missing."""
        for _ in range(YIELDS):
            if self.abort_flag[0]:
                break
            if missing() is None:
                return
            os.sched_yield()
        since, pause = monotonic(), SLEEP
        while (peer := missing()) is not None or self.abort_flag[0]:
            self._watchdog.waits = Wait(collective, since, peer)
            self._watchdog.raise_if_failed()
            if self.abort_flag[0]:
                raise self._watchdog.explain(RuntimeError("another rank ended the group"))
            if peer is not None and self._is_gone(peer):
                raise self._watchdog.explain(RuntimeError("its process has ended"), peer)
            sleep(pause)
            pause = min(MAX_SLEEP, 1.2 * pause)
        self._watchdog.waits = None

    def _is_gone(self, peer: int) -> bool:
        """Has the peer's process ended? ``explain`` finds the reason if it published one."""
        poll = select.poll()  # ``select`` knows no descriptor above 1,023
        poll.register(self._pidfds[peer], select.POLLIN)
        return bool(poll.poll(0))
