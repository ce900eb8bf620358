"""Ranks of one host that map the same memory: a gather moves no bytes.

    common     | bucket 0: shard 0, shard 1 | bucket 1 …      every rank maps it; each writes its
               |                            |                 own shards, all read everything
    own        | gradient bucket | …                          each rank's, read by the others

Over sockets every rank holds a copy of what it gathers. Here a bucket exists once per host, a
shard is a slice of it, and to gather means to know that every rank has finished its update. A
reduction is each rank summing its own slice of the W gradient buckets, in rank order, so results
are the same bits as over gloo. What is left of a collective is one row of four numbers per rank
that says "I am at collective n, which is …": ranks at unlike collectives never pass each other,
and the watchdog finds them.

    row of rank r, collective n (mod ROWS):  n + 1 | tag | where its piece is | n + 1 once read
"""

from __future__ import annotations

import atexit
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

from shardwise.comm.arena import Arena, CommonHeap, Heap
from shardwise.comm.desync import Collective
from shardwise.comm.group import Ending, Group, InFlight, Transfer, nothing
from shardwise.comm.memory import SharedMemory
from shardwise.comm.protocol import Label, Pending, Use, rows_of, splits
from shardwise.comm.watchdog import Wait, Watchdog
from shardwise.errors import RanksDisagree

__all__ = ["SharedMemoryComm", "shared_memory"]

Numbers = np.ndarray[Any, np.dtype[np.int64]]

ROWS = 1024  # collectives in flight at most: a rank that issues more settles its oldest
CONTROL = 1 << 26  # bytes at the start of the common arena that hold the rows
SPINS = 100  # looks, each giving way to other threads, before a rank goes to sleep
NAP, LONGEST_NAP = 20e-6, 1e-3  # seconds


def shared_memory(
    store: Store, rank: int, size: int, timeout: float, ending: Ending | None = None
) -> SharedMemoryComm | None:
    """A comm over memory, or ``None`` (on every rank alike) where the ranks cannot share any."""
    dead: list[Numbers] = []  # nothing to interrupt until the ranks have met

    def interrupt() -> None:
        for word in dead:
            word[0] = 1

    watchdog = Watchdog(PrefixStore("memory/", store), rank, size, interrupt, timeout)
    try:
        opened, pids = _open_everywhere(watchdog, rank)
    except BaseException as error:
        watchdog.leave(f"it raised {error!r}")
        raise
    if opened is None:
        watchdog.leave("the ranks cannot share memory")
        return None
    comm = SharedMemoryComm(rank, size, watchdog, opened, pids, ending)
    dead.append(comm.dead)
    return comm


def _open_everywhere(watchdog: Watchdog, rank: int) -> tuple[list[Arena] | None, list[int]]:
    """The arenas of all ranks, if every rank could open them all; and the ranks' processes."""
    arenas = [Arena.made() for _ in range(1 + (rank == 0))] if _possible() else []
    mine = json.dumps([_host(), os.getpid(), [arena.fd for arena in arenas]])
    greetings = [json.loads(text) for text in watchdog.gather_texts(_first(0), mine)]
    hosts = {host for host, _, _ in greetings}
    opened = _open(greetings, rank, arenas) if len(hosts) == 1 else None
    everywhere = set(watchdog.gather_texts(_first(1), str(opened is not None))) == {"True"}
    return opened if everywhere else None, [pid for _, pid, _ in greetings]


def _first(number: int) -> Collective:
    return Collective(number - 2, "greeting", "start", "", 0)


def _possible() -> bool:
    """Plain loads and stores are enough only where the processor keeps their order."""
    ordered = platform.machine() in ("x86_64", "AMD64")
    return ordered and platform.system() == "Linux"


def _host() -> str:
    """The same text for processes that see each other under ``/proc``, else another."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # like nobody else's


def _open(
    greetings: list[tuple[str, int, list[int]]], rank: int, mine: list[Arena]
) -> list[Arena] | None:
    """The common arena, then every rank's own; ``None`` if one cannot be opened."""
    try:
        common = mine[1] if rank == 0 else Arena.of(greetings[0][1], greetings[0][2][1])
        own = [
            mine[0] if peer == rank else Arena.of(pid, fds[0])
            for peer, (_, pid, fds) in enumerate(greetings)
        ]
    except (OSError, IndexError, ValueError):
        return None
    return [common, *own]


class SharedMemoryComm(Group):
    """One rank's end of a group on one host. Final; see ``Comm``.

    Args:
        arenas: the common one, then each rank's own.
        pids: each rank's process.
        ending: what ends with this object.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        watchdog: Watchdog,
        arenas: list[Arena],
        pids: list[int],
        ending: Ending | None,
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), ending)
        self._watchdog = watchdog
        self._common, *self._own = arenas
        rows = self._common.bytes(0, size * ROWS * 4 * 8).view(np.int64)
        self._rows = rows.reshape(size, ROWS, 4)
        self.dead: Numbers = self._common.bytes(CONTROL - 8, 8).view(np.int64)  # [1]
        self._own_heap = Heap(self._own[rank], self._is_being_read)
        self._common_heap = CommonHeap(self._common, CONTROL)
        self.memory = SharedMemory(self._own_heap, self._common_heap)
        self._room = ROWS  # the first collective whose row may still be in use
        self._flying: list[weakref.ref[InFlight] | None] = [None] * ROWS  # by row
        atexit.register(self._end_with_process)
        self._alive = {peer: os.pidfd_open(pids[peer]) for peer in self.peers}

    # ---- collectives -----------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        if self._common.offset_of(full) is None:
            return super().all_gather(full, label)
        splits(full, self.size, label)
        return self._barrier("all_gather", label, full.nbytes)  # every rank has it already

    def fence(self, label: Label) -> None:
        """Return when every rank has come here: none reads what another will write next."""
        self._barrier("fence", label, 0).wait()

    def _barrier(self, kind: str, label: Label, nbytes: int) -> Pending:
        """A collective that moves nothing."""
        collective = self._next(kind, label, nbytes)
        self._post(collective, 0)
        return self._in_flight(collective, self._transfer(collective, nothing), 0)

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        rows = rows_of(full, self.size)
        self._shown(rows[self.rank], collective)

        def finish() -> None:
            with torch.no_grad():
                for peer in self.peers:
                    rows[peer].copy_(self._piece(peer, collective, rows[peer], 0))

        return self._transfer(collective, finish)

    def _exchange(self, collective: Collective, full: Tensor, use: Use) -> Transfer:
        mine = self._shown(full, collective)

        def finish() -> None:
            pieces = list(rows_of(mine, self.size).unbind())
            for peer in self.peers:
                pieces[peer] = self._piece(peer, collective, pieces[peer], self.rank)
            use(pieces)

        return self._transfer(collective, finish)

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        if self.rank == root:
            self._shown(data, collective)
        else:
            self._post(collective, 0)

        def finish() -> None:
            if self.rank != root:
                with torch.no_grad():
                    data.copy_(self._piece(root, collective, data, 0))

        return self._transfer(collective, finish)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        """Every rank's ``text``; common memory that no rank uses any more may be reused."""
        self._post(collective, 0)
        mine = json.dumps([text, sorted(self._common_heap.unused)])
        texts = self._watchdog.gather_texts(collective, mine, is_gone=self._is_gone)
        self._read(collective)
        pairs = [json.loads(pair) for pair in texts]
        self._common_heap.reuse(set.intersection(*(set(unused) for _, unused in pairs)))
        return [text for text, _ in pairs]

    def _fail(self, reason: str) -> RanksDisagree:
        return self._watchdog.fail(reason)

    def _leave(self, how: str) -> None:
        self._watchdog.leave(how, self.ending.linger)

    # ---- rows ------------------------------------------------------------------------------

    def _post(self, collective: Collective, offset: int) -> None:
        self._watchdog.issue(collective)
        if collective.seq >= self._room:
            self._make_room(collective)
        row = self._rows[self.rank, collective.seq % ROWS]
        row[1], row[2] = collective.tag, offset
        row[0] = collective.seq + 1  # last: who sees it sees the others

    def _make_room(self, collective: Collective) -> None:
        """Return when nobody needs the row of ``collective`` any more for the one before in it.

        A rank that has too many collectives in flight settles its own oldest, and waits for the
        ranks that have not: until then they read in it where their pieces are.
        """
        number, row = collective.seq - ROWS, collective.seq % ROWS
        if self._rows[self.rank, row, 3] <= number:
            flying = self._flying[row]
            if pending := flying and flying():
                pending.wait()
            self._rows[self.rank, row, 3] = number + 1  # also if nobody will ever wait for it
        self._until(collective, partial(self._reader, number))
        read = np.roll(self._rows[:, :, 3].min(axis=0), -row)  # [ROWS], from this row on
        in_use = np.flatnonzero(read <= np.arange(number, number + ROWS))
        self._room = collective.seq + int(in_use[0] if len(in_use) else ROWS)

    def _shown(self, data: Tensor, collective: Collective) -> Tensor:
        """Let peers read ``data``, from where it lies if that is our arena, else from a copy."""
        if data.numel() == 0:
            self._post(collective, 0)
            return data
        arena = self._own[self.rank]
        offset = arena.offset_of(data)
        if offset is None:
            copied = self._own_heap.allocate(data.numel(), data.dtype).copy_(data)
            data, offset = copied, arena.offset_of(copied) or 0
        self._own_heap.show(offset, collective.seq)
        self._post(collective, offset)
        return data

    def _piece(self, peer: int, collective: Collective, like: Tensor, index: int) -> Tensor:
        """Piece ``index`` of what ``peer`` showed; pieces are like ``like``."""
        start = int(self._rows[peer, collective.seq % ROWS, 2]) + index * like.nbytes
        return self._own[peer].tensor(start, like.numel(), like.dtype)

    def _read(self, collective: Collective) -> None:
        self._rows[self.rank, collective.seq % ROWS, 3] = collective.seq + 1

    def _is_being_read(self, number: int) -> bool:
        """May a peer still read what we showed in collective ``number``?"""
        return number >= 0 and self._reader(number) is not None

    def _reader(self, number: int) -> int | None:
        """A peer that has not read what we showed in collective ``number``, if there is one."""
        rows = self._rows[:, number % ROWS, 3]
        return next((peer for peer in self.peers if rows[peer] <= number), None)

    def _arrived(self, collective: Collective) -> int | None:
        """A peer that has not issued ``collective``, if there is one."""
        number, tag, row = collective.seq + 1, collective.tag, collective.seq % ROWS
        for peer in self.peers:
            issued = self._rows[peer, row]
            if issued[0] < number or issued[1] != tag:
                return peer
        return None

    # ---- waiting ---------------------------------------------------------------------------

    def _transfer(self, collective: Collective, finish: Callable[[], None]) -> Transfer:
        def finish_and_tell() -> None:
            finish()
            self._read(collective)

        missing = partial(self._arrived, collective)
        return Transfer(partial(self._until, collective, missing), finish_and_tell)

    def _in_flight(self, collective: Collective, transfer: Transfer, sent: int) -> InFlight:
        pending = super()._in_flight(collective, transfer, sent)
        self._flying[collective.seq % ROWS] = weakref.ref(pending)
        return pending

    def _until(self, collective: Collective, missing: Callable[[], int | None]) -> None:
        """Wait at ``collective`` until no peer is missing."""
        for _ in range(SPINS):
            if self.dead[0]:
                break
            if missing() is None:
                return
            os.sched_yield()
        since, nap = monotonic(), NAP
        while (peer := missing()) is not None or self.dead[0]:
            self._watchdog.waits = Wait(collective, since, -1 if peer is None else peer)
            self._watchdog.raise_if_dead()
            if self.dead[0]:
                raise self._watchdog.explain(-1, RuntimeError("another rank ended the group"))
            if peer is not None and self._is_gone(peer):
                raise self._watchdog.explain(peer, RuntimeError("its process has ended"))
            sleep(nap)
            nap = min(LONGEST_NAP, 1.2 * nap)
        self._watchdog.waits = None

    def _is_gone(self, peer: int) -> bool:
        """Has the process ended? If it left in order, ``explain`` will find that."""
        return peer != self.rank and bool(select.select([self._alive[peer]], [], [], 0)[0])
