"""Ranks within a fifth of a second: a process that has imported everything, and forks them.

A rank that is started as users start it takes three seconds, nearly all of them to import torch;
two hundred cases with two starts each would take half an hour. The nursery imports once, starts no
thread, and each rank is a fork of it: memory, descriptors and threads of its own from then on.

It plays the launcher: it waits for all, and ends what still runs a while after the first death.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.faults.case import EVERYBODY, Case
from benchmarks.faults.trainee import Ended, train

LINUX_PR_SET_PDEATHSIG = 1
RANKS = 2
GRACE = 10.0  # seconds that ranks have to end when another has failed; our launcher gives 5
LONGEST = 60.0  # seconds for a run of which nobody dies
LOOK = 0.004  # seconds between two looks at who is still there


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended, rank by rank."""

    statuses: tuple[int, ...]  # exit statuses; negative: the signal that killed it
    ended: tuple[Ended | None, ...]  # what it said, or ``None``
    errors: tuple[str, ...]  # the last line of what it wrote on stderr; all of it, if it hung
    seconds: float  # that the run took
    lag: float  # seconds from the first rank's end to the last one's
    hung: tuple[int, ...] = ()  # ranks that did not end by themselves when another had


@dataclass(frozen=True)
class _Order:
    run: str
    case: Case
    after: float  # seconds from the first save, after which the nursery kills; 0: it does not


class Nursery:
    """A process to fork runs from. Use it as a context."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, run: Path, case: Case, after: float = 0.0) -> Attempt:
        """Start the trainee, with this case's kill, and wait until nothing of it is left."""
        self._line.send(_Order(str(run), case, after))
        found: Attempt = self._line.recv()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


# --- in the nursery --------------------------------------------------------------------------


def _serve(line: Connection, parent: int) -> None:
    _die_with(parent)
    import torch

    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports half of torch
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads; what is forked now would hang on their locks"
    while True:
        try:
            order: _Order = line.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as scratch:
            line.send(_run(order, Path(scratch)))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(LINUX_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _run(order: _Order, scratch: Path) -> Attempt:
    start = time.monotonic()
    pids: list[int] = []
    for rank in range(RANKS):
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            _rank(rank, order, scratch, nursery)
        os.setpgid(pid, pids[0] if pids else pid)  # so that all can be killed at once
        pids.append(pid)
    (scratch / "go").touch()
    ends, hung = _await(pids, order, scratch)
    told = [_told(scratch / f"{rank}.json") for rank in range(RANKS)]
    logs = [_log(scratch / f"{rank}.log") for rank in range(RANKS)]
    errors = ["\n".join(log if hung else log[-1:]) for log in logs]
    moments = [moment for _, moment in ends]
    return Attempt(
        tuple(status for status, _ in ends),
        tuple(told),
        tuple(errors),
        time.monotonic() - start,
        max(moments) - min(moments),
        tuple(hung),
    )


def _await(
    pids: list[int], order: _Order, scratch: Path
) -> tuple[list[tuple[int, float]], list[int]]:
    """Each rank's exit status and when it ended; and which had to be killed."""
    ends: dict[int, tuple[int, float]] = {}
    hung: list[int] = []
    deadline, strike = time.monotonic() + LONGEST, 0.0
    while len(ends) < len(pids):
        for pid in pids:
            if pid not in ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                ends[pid] = os.waitstatus_to_exitcode(done[1]), time.monotonic()
                deadline = min(deadline, time.monotonic() + GRACE)
        now = time.monotonic()
        if order.after and not strike and (scratch / "begun").exists():
            strike = now + order.after
        if strike and now >= strike:
            _kill(pids, ends, order.case.kill.who)
            strike = float("inf")
        if now > deadline and not hung:
            hung = [rank for rank, pid in enumerate(pids) if pid not in ends]
            _kill(pids, ends, EVERYBODY, signal.SIGUSR2)  # it writes where it stands
            time.sleep(1.0)
            _kill(pids, ends, EVERYBODY)
        time.sleep(LOOK)
    return [ends[pid] for pid in pids], hung


def _kill(
    pids: list[int],
    ends: dict[int, tuple[int, float]],
    who: int,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    for rank, pid in enumerate(pids):
        if who in (EVERYBODY, rank) and pid not in ends:  # not reaped, so the number is still its
            os.kill(pid, number)


def _told(path: Path) -> Ended | None:
    return Ended.decode(path.read_text()) if path.exists() else None


def _log(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


# --- in a rank -------------------------------------------------------------------------------


def _rank(rank: int, order: _Order, scratch: Path, nursery: int) -> None:
    """Never returns: what the nursery has open and planned is not this process's."""
    code = 1
    try:
        _die_with(nursery)
        log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR2)
        while not (scratch / "go").exists():  # until all are in one group
            time.sleep(0.001)
        ended = _train(rank, order, scratch)
        unfinished = scratch / f"{rank}.tmp"
        unfinished.write_text(ended.encode())
        unfinished.rename(scratch / f"{rank}.json")
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _train(rank: int, order: _Order, scratch: Path) -> Ended:
    import torch.distributed as dist

    from shardwise.comm import connect

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(scratch / "store"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with connect.over(dist.group.WORLD) as comm:
        return train(comm, Path(order.run), order.case, (scratch / "begun").touch)
