"""One process per rank on this machine: started together, told together, ended together.

Each rank finds what torchrun would tell it in its environment, so that a script needs to know one
launcher only. torchrun's own agent passes on no SIGUSR1, kills ranks that still save after 30 s,
takes every status but 0 for a crash, and its store listens on all interfaces; here a signal to
the launcher is one to every rank, a rank may take its time to stop, status 75 means "start me
again", and everything stays on the loopback interface.

    1. a store, and one process per rank      2. wait; pass signals on
    3. if one failed, end the others          4. start again, as often as was said
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.errors import ShardwiseError
from shardwise.launch.reasons import REPORT, Ended, cause
from shardwise.launch.signals import Handler, handled

__all__ = ["STOPPED", "attempt", "cores", "end_with_launcher", "environment", "start"]

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped as asked; start the same again
ATTEMPT, LAUNCH = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
LIFELINE = "SHARDWISE_LIFELINE"
PR_SET_PDEATHSIG = 1
LOOPBACK = {"Linux": "lo", "Darwin": "lo0"}
GLANCE = 0.05  # seconds between two looks at the ranks
GRACE = 5.0  # seconds that ranks have to end when another has failed


def start(
    command: Sequence[str],
    ranks: int,
    restarts: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> None:
    """Run ``command`` as ``ranks`` processes of this machine until all have ended.

    Each gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun, writes
    to this process's terminal, and has its share of the cores. If one fails, the others are ended.
    Signals to this process reach every rank: SIGTERM, SIGHUP and the first SIGINT as SIGTERM, the
    second SIGINT and SIGUSR1 as what they are. SIGQUIT, or a third SIGINT, ends all at once.
    SIGTSTP (Ctrl-Z) suspends the ranks and this process, until it is continued.

    Args:
        command: a program and its arguments.
        ranks: how many.
        restarts: how often all ranks are started again after one of them died. Not where a rank
            gave a reason of ours that would be the same again, such as a recipe that cannot work.
        told: gets a sentence for each restart.

    Raises:
        ShardwiseError: a rank failed; the message is its reason.
        KeyboardInterrupt: the user pressed Ctrl-C, and the ranks ended of it.
        SystemExit: the ranks stopped as they were asked to (75), or another signal ended them.
    """
    orders, launch = _Orders(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name, handled(orders.handlers):
        for number in range(restarts + 1):
            folder = Path(name) / str(number)
            folder.mkdir()
            running = _Ranks.started(
                command, folder, _variables(ranks, restarts, number) | {LAUNCH: launch}
            )
            try:
                ended = _waited(running, orders)
            finally:
                running.end()
            if not ended or orders.stopping or all(one.status == STOPPED for one in ended):
                break
            first = cause(ended)
            if number == restarts or first.final:
                raise ShardwiseError(first.reason)
            told(f"{first.fact}; all ranks start again ({number + 1} of {restarts})")
    _conclude(ended, orders)


def _conclude(ended: Sequence[Ended], orders: _Orders) -> None:
    """All ended well, or as they were told."""
    if not ended:
        return
    told_to = {STOPPED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL, 128 + signal.SIGINT}
    if others := [one for one in ended if one.status not in told_to]:
        raise ShardwiseError(cause(others).reason)
    if all(one.status == STOPPED for one in ended):
        sys.exit(STOPPED)
    if orders.stopping == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + orders.stopping)


def attempt(environ: Mapping[str, str]) -> tuple[int, str]:
    """How often this rank's launcher has started all ranks again, and the launcher's name.

    Without one, ``(0, "")``. torchrun's name is that of ``--rdzv-id``.
    """
    return int(environ.get(ATTEMPT, "0")), environ.get(LAUNCH, "")


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Called in a rank: if the launcher dies, however it dies, so does this process.

    Else a rank would train on, seen by nobody, in the folder of the run that is started next.
    """
    if LIFELINE in environ:
        if platform.system() == "Linux":  # this reaches a rank that is suspended, too
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        lifeline = int(environ[LIFELINE])

        def wait() -> None:
            os.read(lifeline, 1)  # nobody writes: it returns when the other end is closed
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()


# --- the processes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ranks:
    """The processes of one attempt, the store where they meet, and what ends them with us."""

    processes: list[subprocess.Popen[bytes]]
    reports: list[Path]
    store: TCPStore
    lifeline: IO[bytes]

    @classmethod
    def started(cls, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> _Ranks:
        store, port = _store()
        theirs, ours = os.pipe()
        reports = [folder / f"{rank}.json" for rank in range(int(variables["WORLD_SIZE"]))]
        given = {**os.environ, **variables, "MASTER_PORT": str(port), LIFELINE: str(theirs)}
        running = cls([], reports, store, os.fdopen(ours, "wb", buffering=0))
        try:
            with handled({signal.SIGUSR1: signal.SIG_IGN}):  # a rank has no ears for it yet
                for rank, report in enumerate(reports):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), REPORT: str(report)}
                    own |= {"ROLE_RANK": str(rank)}
                    process = subprocess.Popen(  # noqa: S603 - what the user asked to run
                        command,
                        env=given | own,
                        pass_fds=[theirs],
                        start_new_session=True,  # or the terminal's Ctrl-C would reach it twice
                    )
                    running.processes.append(process)
        except BaseException:
            running.end()
            raise
        finally:
            os.close(theirs)
        return running

    def tell(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self.processes:
            process.send_signal(number)

    def suspend(self) -> None:
        """Suspend all ranks, and this process; when it goes on, so do they."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: int) -> None:
        """To every rank that runs, with everything that it has started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def failed(self) -> list[Ended]:
        """Those that have ended with another status than 0."""
        pairs = enumerate(zip(self.processes, self.reports, strict=True))
        return [
            Ended.found(rank, process.pid, status, report)
            for rank, (process, report) in pairs
            if (status := process.poll())
        ]

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def end(self, grace: float = 0.0) -> None:
        """End all, with everything that they have started; ask first if there is ``grace``."""
        if grace:
            self.tell(signal.SIGTERM)
            until = time.monotonic() + grace
            while self.running and time.monotonic() < until:
                time.sleep(GLANCE)
        self._signal_groups(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.lifeline.close()


def _store() -> tuple[TCPStore, int]:
    """A store of our own, which outlives the ranks, on a free port of the loopback interface."""
    server = socket.create_server(("127.0.0.1", 0))
    port = int(server.getsockname()[1])
    # torch would listen on all interfaces; a socket that listens already is used as it is.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    return store, port


def _waited(running: _Ranks, orders: _Orders) -> list[Ended]:
    """Until all have ended: those that did not end well."""
    while running.running:
        for number in orders.taken():
            if number == signal.SIGTSTP:
                running.suspend()
            else:
                running.tell(number)
        if orders.at_once:
            running.end()
        crashed = [one for one in running.failed() if one.status != STOPPED]
        if crashed:
            running.end(GRACE)
            # Who was seen first stays first, whatever the others ended with.
            seen = {one.rank: one for one in crashed}
            return [seen.get(one.rank, one) for one in running.failed()]
        time.sleep(GLANCE)
    return running.failed()


# --- what they are told ----------------------------------------------------------------------


@dataclass
class _Orders:
    """What this process was told and has not yet passed on."""

    waiting: list[int] = field(default_factory=list)
    stopping: int = 0
    interrupts: int = 0
    at_once: bool = False

    @property
    def handlers(self) -> dict[signal.Signals, Handler]:
        names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGTSTP")
        return {signal.Signals[name]: self._hear for name in names}

    def taken(self) -> list[int]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGUSR1, signal.SIGTSTP):
            self.waiting.append(number)
            return
        self.interrupts += number == signal.SIGINT
        self.at_once = self.at_once or number == signal.SIGQUIT or self.interrupts > 2
        # A rank that has no ears yet dies of SIGTERM in silence, and of SIGINT with a traceback.
        again = number == signal.SIGINT and bool(self.stopping)
        self.waiting.append(signal.SIGINT if again else signal.SIGTERM)
        self.stopping = self.stopping or number


def _variables(ranks: int, restarts: int, number: int) -> dict[str, str]:
    """What all ranks of one attempt have in their environment."""
    return {
        **environment(ranks),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        ATTEMPT: str(number),
    }


def cores() -> int:
    """The cores that this process may use."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(ranks: int) -> dict[str, str]:
    """What ranks need besides the launcher's variables, where the user has not set it."""
    wanted = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    if platform.system() in LOOPBACK:
        # Otherwise gloo listens on the address that the host's name resolves to.
        wanted["GLOO_SOCKET_IFNAME"] = LOOPBACK[platform.system()]
    return {name: value for name, value in wanted.items() if name not in os.environ}
