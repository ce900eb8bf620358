"""Ranks within a fifth of a second: a process that has imported torch, and forks them.

A rank that is started as users start it takes three seconds, nearly all of them to import torch.
The server imports once, starts no thread, and forks each rank. It does what a launcher does: it
waits for all ranks, and ends what still runs a while after the first has died.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from benchmarks.faults.case import EVERYBODY, Case
from benchmarks.faults.training import Final, train
from benchmarks.harness.workers import die_with, join_group

RANKS = 2
GRACE = 10.0  # seconds that ranks have to end when another has failed; our launcher gives 5
LONGEST = 60.0  # seconds for a run of which nobody dies
PAUSE = 0.004  # seconds between two looks at which ranks have ended


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended, rank by rank."""

    statuses: tuple[int, ...]  # exit statuses; negative: the signal that killed it
    finals: tuple[Final | None, ...]  # its state at its end, if it came to it
    errors: tuple[str, ...]  # the last line that it wrote on stderr; all of it, if a rank hung
    seconds: float  # that the run took
    lag: float  # seconds from the first rank's end to the last one's
    hung: tuple[int, ...] = ()  # ranks that did not end by themselves when another had


@dataclass(frozen=True)
class _Order:
    run: str
    case: Case
    after: float  # seconds from the first save, after which the server kills; 0: it does not


class RankServer:
    """A process to fork runs from. Use it as a context."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, run: Path, case: Case, after: float = 0.0) -> Attempt:
        """Train, with this case's kill, and wait until every rank has ended."""
        self._pipe.send(_Order(str(run), case, after))
        attempt: Attempt = self._pipe.recv()
        return attempt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


# --- in the server ---------------------------------------------------------------------------


def _serve(pipe: Connection, parent: int) -> None:
    die_with(parent)
    import torch

    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports half of torch
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads; what is forked now would hang on their locks"
    while True:
        try:
            order: _Order = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as scratch:
            pipe.send(_run(order, Path(scratch)))


@dataclass
class _Ranks:
    """The processes of a run, and how those that have ended did."""

    pids: list[int]
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)  # exit status and time
    hung: tuple[int, ...] = ()

    def wait(self, order: _Order, begun: Path) -> None:
        """Until all have ended; those that do not in time are killed."""
        deadline, strike = time.monotonic() + LONGEST, 0.0
        while len(self.ends) < len(self.pids):
            if self._reap():
                deadline = min(deadline, time.monotonic() + GRACE)
            now = time.monotonic()
            if order.after and not strike and begun.exists():
                strike = now + order.after
            if strike and now >= strike:
                self._kill(order.case.kill.who)
                strike = float("inf")
            if now > deadline and not self.hung:
                self.hung = tuple(r for r, pid in enumerate(self.pids) if pid not in self.ends)
                self._kill(EVERYBODY, signal.SIGUSR2)  # each writes where it stands
                time.sleep(1.0)
                self._kill(EVERYBODY)
            time.sleep(PAUSE)

    def _reap(self) -> bool:
        """Has another one ended?"""
        before = len(self.ends)
        for pid in self.pids:
            if pid not in self.ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                self.ends[pid] = os.waitstatus_to_exitcode(done[1]), time.monotonic()
        return len(self.ends) > before

    def _kill(self, who: int, number: signal.Signals = signal.SIGKILL) -> None:
        for rank, pid in enumerate(self.pids):
            if who in (EVERYBODY, rank) and pid not in self.ends:  # a reaped number may be another
                os.kill(pid, number)


def _run(order: _Order, scratch: Path) -> Attempt:
    start, server = time.monotonic(), os.getpid()
    pids: list[int] = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _rank(rank, order, scratch, server)
        os.setpgid(pid, pids[0] if pids else pid)  # so that all can be killed at once
        pids.append(pid)
    (scratch / "go").touch()
    ranks = _Ranks(pids)
    ranks.wait(order, scratch / "begun")
    logs = [(scratch / f"{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
    lines = [log.splitlines() if ranks.hung else log.splitlines()[-1:] for log in logs]
    statuses, times = zip(*(ranks.ends[pid] for pid in pids), strict=True)
    return Attempt(
        statuses,
        tuple(Final.read(scratch / f"{rank}.json") for rank in range(RANKS)),
        tuple(map("\n".join, lines)),
        time.monotonic() - start,
        max(times) - min(times),
        ranks.hung,
    )


# --- in a rank -------------------------------------------------------------------------------


def _rank(rank: int, order: _Order, scratch: Path, server: int) -> None:
    """Never returns: what the server has open and planned is not this process's."""
    code = 1
    try:
        log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        die_with(server)
        faulthandler.register(signal.SIGUSR2)
        while not (scratch / "go").exists():  # until all are in one process group
            time.sleep(0.001)
        _train(rank, order, scratch).write(scratch / f"{rank}.json")
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _train(rank: int, order: _Order, scratch: Path) -> Final:
    import torch.distributed as dist

    from shardwise.comm import connect

    join_group(rank, RANKS, str(scratch))
    with connect.over(dist.group.WORLD) as comm:
        return train(comm, Path(order.run), order.case, (scratch / "begun").touch)
