"""One start of a run: two ranks, and how they end.

Ranks are forked from a process that has imported torch: one that is started as users start it
takes three seconds. What starts them does what a launcher does: it waits for all ranks, and ends
what still runs a while after the first has died. Where the launcher itself is killed, all is as
users start it; a rank kills it, and then goes on for a minute, unless somebody ends it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.faults.case import EVERYBODY, Case
from benchmarks.faults.training import Final, train
from benchmarks.harness.workers import Worker, Workers

RANKS = 2
GRACE = 10.0  # seconds that ranks have to end when another has failed; our launcher gives 5
LONGEST = 60.0  # seconds for a run without a kill
PAUSE = 0.004  # seconds between two looks
PRELOADED = ("benchmarks.faults.training", "shardwise.comm.machine.connect", "torch._dynamo")
LAUNCH = (
    "import sys; from shardwise.launch.launcher import start; start(sys.argv[2:], int(sys.argv[1]))"
)
DEADLINE = 5.0  # seconds for which a rank may outlive its launcher


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended, rank by rank."""

    statuses: tuple[int, ...]  # exit statuses; negative: the signal that killed it
    finals: tuple[Final | None, ...]  # its state at its end, if it came to it
    errors: tuple[str, ...]  # the last line of its traceback; all of it, if a rank hung
    seconds: float  # that the run took
    lag: float  # seconds from the first rank's end to the last one's
    hung: tuple[int, ...] = ()  # ranks that did not end by themselves when another had


def start(run: Path, case: Case, after: float = 0.0) -> Attempt:
    """Train, with this case's kill, and wait until every rank has ended.

    Args:
        run: the folder of the run.
        case: how it saves, and where it is killed.
        after: seconds from the first save, after which ``case.kill.who`` is killed; 0: nobody.
    """
    # Does nothing where the server runs already.
    get_context("forkserver").set_forkserver_preload([*PRELOADED])
    begin = time.monotonic()
    with Workers(RANKS, _rank, run, case, start="forkserver") as ranks:
        ends, hung = _wait_for(ranks, case.kill.who, after)
        finals, errors = [], []
        for succeeded, value in map(ranks.last_of, range(RANKS)):
            finals.append(value if isinstance(value, Final) else None)
            errors.append("" if succeeded else value if hung else value.strip().rpartition("\n")[2])
        return Attempt(
            tuple(process.exitcode or 0 for process in ranks.processes),
            tuple(finals),
            tuple(errors),
            time.monotonic() - begin,
            max(ends) - min(ends),
            hung,
        )


def _wait_for(ranks: Workers, who: int, after: float) -> tuple[list[float], tuple[int, ...]]:
    """When each has ended, and which hung: those that do not end in time are killed."""
    deadline, strike = time.monotonic() + LONGEST, float("inf")
    ends: dict[int, float] = {}
    hung: tuple[int, ...] = ()
    while left := [n for n in range(RANKS) if n not in ends]:
        ended = wait([ranks.processes[n].sentinel for n in left], PAUSE if after else 0.1)
        now = time.monotonic()
        for rank in (n for n in left if ranks.processes[n].sentinel in ended):
            ranks.processes[rank].join()
            ends[rank] = now
            deadline = min(deadline, now + GRACE)
        if after and ranks.has_sent(0):  # the first save begins
            after, strike = 0.0, now + after
        if now >= strike:
            strike = float("inf")
            _kill(ranks, who)
        if now > deadline and not hung:
            hung = tuple(n for n in left if n not in ends)
            _kill(ranks, EVERYBODY)
    return list(ends.values()), hung


def _kill(ranks: Workers, who: int) -> None:
    for rank, process in enumerate(ranks.processes):
        if who in (EVERYBODY, rank):
            process.kill()


def _rank(worker: Worker, run: Path, case: Case) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.comm.machine import connect

    if worker.rank == 0:
        os.setpgid(0, 0)
    worker.join_group()
    leader = torch.tensor(os.getpid() if worker.rank == 0 else 0)
    dist.all_reduce(leader)
    os.setpgid(0, int(leader))  # so that all ranks can be killed at once
    with connect.over(dist.group.WORLD) as comm:
        worker.send(train(comm, run, case, partial(worker.send, "the first save begins")))


# ---- under the project's own launcher -------------------------------------------------------


def launched(run: Path, case: Case) -> Attempt:
    """Launch the run, wait until the launcher has ended, and then until its ranks have."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder), time.monotonic()
        training = [sys.executable, "-m", "benchmarks.faults.training"]
        command = [*training, str(run), pickle.dumps(case).hex(), str(out)]
        launcher = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-c", LAUNCH, str(RANKS), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        over = time.monotonic()
        pids = [int((out / f"{rank}.pid").read_text()) for rank in range(RANKS)]
        lived = tuple(rank for rank, pid in enumerate(pids) if _lives(pid, over + DEADLINE))
        lag = time.monotonic() - over
        status, errors = launcher.returncode, launcher.stderr[-2000:]
        return Attempt(
            (status,) * RANKS, (None,) * RANKS, (errors,) * RANKS, over - begin, lag, lived
        )


def _lives(pid: int, deadline: float) -> bool:
    """Does the rank still live at the deadline? If so, it is ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # A zombie has ended, too, and nobody has waited for it.
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                return True
            time.sleep(PAUSE)
    return False
