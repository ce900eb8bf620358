"""One start of a run: two ranks, forked from a process that has imported torch, and how they end.

A rank that is started as users start it takes three seconds, nearly all of them to import torch.
What starts them does what a launcher does: it waits for all ranks, and ends what still runs a
while after the first has died.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from benchmarks.faults.case import EVERYBODY, Case
from benchmarks.faults.training import Final, train
from benchmarks.harness.workers import end_with_parent, join_group

RANKS = 2
GRACE = 10.0  # seconds that ranks have to end when another has failed; our launcher gives 5
LONGEST = 60.0  # seconds for a run of which nobody dies
PAUSE = 0.004  # seconds between two looks at whether the first save has begun
PRELOADED = ("benchmarks.faults.training", "shardwise.comm.connect", "torch._dynamo")


@dataclass(frozen=True)
class Attempt:
    """How one start of a run ended, rank by rank."""

    statuses: tuple[int, ...]  # exit statuses; negative: the signal that killed it
    finals: tuple[Final | None, ...]  # its state at its end, if it came to it
    errors: tuple[str, ...]  # the last line that it wrote on stderr; all of it, if a rank hung
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
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])  # does nothing where the server runs already
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        ranks = [
            context.Process(target=_rank, args=(rank, run, case, scratch), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        (scratch / "leader.unfinished").write_text(str(ranks[0].pid))
        (scratch / "leader.unfinished").rename(scratch / "leader")
        ends, hung = _wait_for(ranks, case.kill.who, after, scratch / "begun")
        logs = [(scratch / f"{rank}.log").read_text(errors="replace") for rank in range(RANKS)]
        lines = [log.splitlines() if hung else log.splitlines()[-1:] for log in logs]
        return Attempt(
            tuple(rank.exitcode or 0 for rank in ranks),
            tuple(Final.read(scratch / f"{rank}.json") for rank in range(RANKS)),
            tuple(map("\n".join, lines)),
            time.monotonic() - begin,
            max(ends) - min(ends),
            hung,
        )


def _wait_for(
    ranks: list[ForkServerProcess], who: int, after: float, begun: Path
) -> tuple[list[float], tuple[int, ...]]:
    """When each has ended, and which hung: those that do not end in time are killed."""
    deadline, strike = time.monotonic() + LONGEST, 0.0
    ends: dict[int, float] = {}
    hung: tuple[int, ...] = ()
    while left := [n for n in range(len(ranks)) if n not in ends]:
        ended = wait([ranks[n].sentinel for n in left], PAUSE if after else 0.1)
        now = time.monotonic()
        for rank in (n for n in left if ranks[n].sentinel in ended):
            ranks[rank].join()
            ends[rank] = now
            deadline = min(deadline, now + GRACE)
        if after and not strike and begun.exists():
            strike = now + after
        if strike and now >= strike:
            _signal(ranks, who, signal.SIGKILL)
            strike = float("inf")
        if now > deadline and not hung:
            hung = tuple(n for n in left if n not in ends)
            _signal(ranks, EVERYBODY, signal.SIGUSR2)  # each writes where it stands
            time.sleep(1.0)
            _signal(ranks, EVERYBODY, signal.SIGKILL)
    return list(ends.values()), hung


def _signal(ranks: list[ForkServerProcess], who: int, number: signal.Signals) -> None:
    for rank, process in enumerate(ranks):
        if who in (EVERYBODY, rank) and process.is_alive() and process.pid is not None:
            os.kill(process.pid, number)


# --- in a rank -------------------------------------------------------------------------------


def _rank(rank: int, run: Path, case: Case, scratch: Path) -> None:
    """Never returns: what the server has planned for its end is not this process's."""
    code = 1
    try:
        log = os.open(scratch / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        threading.Thread(target=end_with_parent, daemon=True).start()
        faulthandler.register(signal.SIGUSR2)
        _join_process_group(rank, scratch / "leader")
        _train(rank, run, case, scratch).write(scratch / f"{rank}.json")
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _join_process_group(rank: int, leader: Path) -> None:
    """So that all ranks can be killed at once."""
    if rank == 0:
        os.setpgid(0, 0)
        leader.with_name("led").touch()
        return
    while not (leader.exists() and leader.with_name("led").exists()):
        time.sleep(0.001)
    os.setpgid(0, int(leader.read_text()))


def _train(rank: int, run: Path, case: Case, scratch: Path) -> Final:
    import torch
    import torch.distributed as dist

    from shardwise.comm import connect

    torch.set_num_threads(1)
    join_group(rank, RANKS, str(scratch))
    with connect.over(dist.group.WORLD) as comm:
        return train(comm, run, case, (scratch / "begun").touch)
