"""A launcher for one machine: starts one process per rank, forwards signals, restarts, ends all.

Ranks get the environment variables of torchrun, so a script need know only one launcher.
torchrun's agent forwards no SIGUSR1, kills ranks that still save after 30 s, takes every status
but 0 for a crash, and its store listens on all interfaces. This launcher forwards every signal,
lets a rank take its time to stop, knows status 75 as "start me again", and uses the loopback
interface only.

    1. start one process per rank, and a store      2. wait; forward signals
    3. if a rank failed, end the others             4. start again, up to ``restarts`` times

The store needs torch. Ranks that are programs import it at once, while this process does; a rank
of our own is forked from this process when it has imported all, and so is the store, whose threads
would make it unsafe to fork again at a restart.
"""

from __future__ import annotations

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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from shardwise.errors import ShardwiseError
from shardwise.launch.error_files import ERROR_FILE, RankFailure, root_cause
from shardwise.launch.fork import Fork, end_with_parent
from shardwise.launch.signals import Handler, signal_handlers
from shardwise.launch.store import forked_store, store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped as asked; start the same again
RESTART_COUNT, RUN_ID = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
LIFELINE = "SHARDWISE_LIFELINE"
LOOPBACK = {"Linux": "lo", "Darwin": "lo0"}
POLL_INTERVAL = 0.05  # seconds
TERMINATE_GRACE = 5.0  # seconds from SIGTERM to SIGKILL, after another rank has failed


def start(
    command: Sequence[str],
    ranks: int,
    restarts: int = 0,
    on_restart: Callable[[str], None] = lambda _: None,
    check: Callable[[], bool] = lambda: True,
    prepare: Callable[[], Callable[[], object] | None] = lambda: None,
) -> None:
    """Run ``command`` as ``ranks`` processes of this machine until all have ended.

    Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun,
    writes to this process's terminal, and has its share of the cores. If one fails, the others
    are ended. Signals to this process are forwarded to every rank: SIGTERM, SIGHUP and the first
    SIGINT as SIGTERM, the second SIGINT and SIGUSR1 unchanged. SIGQUIT, or a third SIGINT, kills
    all ranks. SIGTSTP (Ctrl-Z) suspends the ranks and this process until it is continued.

    Args:
        command: a program and its arguments.
        ranks: the number of processes.
        restarts: how often all ranks are started again after one of them died. An error that
            would repeat, such as an invalid recipe, is raised without a restart.
        on_restart: called with a sentence at each restart.
        check: called while the ranks start, before they can meet; if it raises, or returns
            ``False``, they are ended.
        prepare: called first; if it returns a function, which does what ``command`` does, each
            rank is a fork of this process that calls it.

    Raises:
        ShardwiseError: a rank failed; the message is that of the first failure.
        KeyboardInterrupt: Ctrl-C ended the ranks.
        SystemExit: the ranks saved and stopped as requested (75), or another signal ended them.
    """
    signals, run_id = _SignalQueue(), uuid.uuid4().hex
    with signal_handlers(signals.handlers):
        main = prepare()
        for restart in range(restarts + 1):
            variables = _rank_environment(ranks, restarts, restart) | {RUN_ID: run_id}
            with ExitStack() as files:
                error_files = [_error_file(files) for _ in range(ranks)]
                server = files.enter_context(socket.create_server(("127.0.0.1", 0)))
                variables["MASTER_PORT"] = str(server.getsockname()[1])
                running = _Ranks.launch(command, main, error_files, variables)
                try:
                    if not restart and not check():
                        return
                    running.store = forked_store(server) if main else store(server)
                    failures = _wait(running, signals)
                finally:
                    running.end()
                    running.end_store()
            if signals.stop_signal or {failure.status for failure in failures} <= {EXIT_STOPPED}:
                break
            first_failure = root_cause(failures)
            if restart == restarts or first_failure.is_permanent:
                raise ShardwiseError(first_failure.error_message)
            on_restart(
                f"{first_failure.summary}; all ranks start again ({restart + 1} of {restarts})"
            )
    _raise_or_exit(failures, signals)


def _raise_or_exit(failures: Sequence[RankFailure], signals: _SignalQueue) -> None:
    """End as the ranks did: return, raise their error, or exit with their status."""
    if not failures:
        return
    expected = {EXIT_STOPPED, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL, 128 + signal.SIGINT}
    if unexpected := [failure for failure in failures if failure.status not in expected]:
        raise ShardwiseError(root_cause(unexpected).error_message)
    if all(failure.status == EXIT_STOPPED for failure in failures):
        sys.exit(EXIT_STOPPED)
    if signals.stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signals.stop_signal)


def launch_attempt(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how often all ranks were restarted, and the run id (torchrun's ``--rdzv-id``).

    Without a launcher ``(0, "")``.
    """
    return int(environ.get(RESTART_COUNT, "0")), environ.get(RUN_ID, "")


def exit_with_launcher(environ: Mapping[str, str]) -> None:
    """Called in a rank: kill this process when the launcher dies, for whatever reason.

    Otherwise an orphaned rank would go on writing to the folder of the run that is started next.
    torchrun leaves its ranks behind when it is killed; mpirun and srun do not.
    """
    if platform.system() == "Linux" and RUN_ID in environ:  # this kills a suspended rank, too
        end_with_parent()
    if LIFELINE in environ:
        lifeline = int(environ[LIFELINE])

        def wait() -> None:
            os.read(lifeline, 1)  # nobody writes: it returns when the other end is closed
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()


# --- the processes ---------------------------------------------------------------------------


_Process = subprocess.Popen[bytes] | Fork


@dataclass
class _Ranks:
    """The processes of one attempt, their rendezvous store, and the pipe that ends them with us."""

    processes: list[_Process]
    error_files: list[Path]
    lifeline: IO[bytes]
    store: TCPStore | Fork | None = None  # it outlives the ranks

    @classmethod
    def launch(
        cls,
        command: Sequence[str],
        main: Callable[[], object] | None,
        error_files: list[Path],
        variables: Mapping[str, str],
    ) -> _Ranks:
        read_end, write_end = os.pipe()
        environ = {**os.environ, **variables, LIFELINE: str(read_end)}
        ranks = cls([], error_files, os.fdopen(write_end, "wb", buffering=0))
        try:
            for rank, error_file in enumerate(error_files):
                rank_environ = {
                    **environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "ROLE_RANK": str(rank),
                    ERROR_FILE: str(error_file),
                }
                ranks.processes.append(
                    Fork(main, command, rank_environ, read_end)
                    if main
                    else _spawned(command, rank_environ, read_end)
                )
        except BaseException:
            ranks.end()
            raise
        finally:
            os.close(read_end)
        return ranks

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self.processes:
            process.send_signal(number)

    def suspend(self) -> None:
        """Suspend all ranks and this process; continue the ranks when this process continues."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: int) -> None:
        """Send a signal to every rank that runs and to the processes that it has started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def failures(self) -> list[RankFailure]:
        """The ranks that have ended with a status other than 0, and the store if it has ended."""
        pairs = enumerate(zip(self.processes, self.error_files, strict=True))
        failed = [
            RankFailure.from_error_file(rank, process.pid, status, error_file)
            for rank, (process, error_file) in pairs
            if (status := process.poll())
        ]
        if isinstance(self.store, Fork) and (status := self.store.poll()) is not None:
            failed.append(RankFailure.of_store(self.store.pid, status))
        return failed

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def end(self, grace: float = 0.0) -> None:
        """Kill all ranks and their children; with ``grace`` seconds, send SIGTERM first."""
        if grace:
            self.send_signal(signal.SIGTERM)
            until = time.monotonic() + grace
            while self.running and time.monotonic() < until:
                time.sleep(POLL_INTERVAL)
        self._signal_groups(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.lifeline.close()

    def end_store(self) -> None:
        """Kill the store, after the ranks: whether it had ended before them is a failure."""
        if isinstance(self.store, Fork):
            self.store.send_signal(signal.SIGKILL)
            self.store.wait()


def _spawned(command: Sequence[str], environ: Mapping[str, str], lifeline: int) -> _Process:
    with signal_handlers({signal.SIGUSR1: signal.SIG_IGN}):  # a new rank has no handler yet
        return subprocess.Popen(  # noqa: S603 - what the user asked to run
            command,
            env=environ,
            pass_fds=[lifeline],
            start_new_session=True,  # or the terminal's Ctrl-C would reach it twice
        )


def _error_file(files: ExitStack) -> Path:
    """A file for one rank's error, until ``files`` closes.

    On Linux it has no name in a folder, so a launcher that is killed leaves none.
    """
    if platform.system() != "Linux":
        return Path(files.enter_context(tempfile.NamedTemporaryFile(prefix="shardwise-")).name)
    descriptor = os.memfd_create("error")
    files.callback(os.close, descriptor)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _wait(ranks: _Ranks, signals: _SignalQueue) -> list[RankFailure]:
    """Wait until all ranks have ended; returns those that failed."""
    while ranks.running:
        for number in signals.take_pending():
            if number == signal.SIGTSTP:
                ranks.suspend()
            else:
                ranks.send_signal(number)
        if signals.kill_now:
            ranks.end()
        crashes = [failure for failure in ranks.failures() if failure.status != EXIT_STOPPED]
        if crashes:
            ranks.end(TERMINATE_GRACE)
            # The status that was seen first counts: it was not caused by ending the ranks.
            by_rank = {failure.rank: failure for failure in (*ranks.failures(), *crashes)}
            return list(by_rank.values())
        time.sleep(POLL_INTERVAL)
    return ranks.failures()


# --- signals ---------------------------------------------------------------------------------


@dataclass
class _SignalQueue:
    """Signals that this process has received and not yet forwarded.

    Attributes:
        pending: to be forwarded.
        stop_signal: the first one that asked to stop; 0 if none did.
        sigint_count: SIGINTs received.
        kill_now: kill the ranks without waiting.
    """

    pending: list[int] = field(default_factory=list)
    stop_signal: int = 0
    sigint_count: int = 0
    kill_now: bool = False

    @property
    def handlers(self) -> dict[signal.Signals, Handler]:
        names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGTSTP")
        return {signal.Signals[name]: self._handle for name in names}

    def take_pending(self) -> list[int]:
        pending, self.pending = self.pending, []
        return pending

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGUSR1, signal.SIGTSTP):
            self.pending.append(number)
            return
        self.sigint_count += number == signal.SIGINT
        self.kill_now = self.kill_now or number == signal.SIGQUIT or self.sigint_count > 2
        # A rank without handlers yet dies of SIGTERM silently, and of SIGINT with a traceback.
        is_repeated = number == signal.SIGINT and bool(self.stop_signal)
        self.pending.append(signal.SIGINT if is_repeated else signal.SIGTERM)
        self.stop_signal = self.stop_signal or number


def _rank_environment(ranks: int, restarts: int, number: int) -> dict[str, str]:
    """Environment variables that are the same on all ranks of one attempt."""
    return {
        **default_environment(ranks),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        RESTART_COUNT: str(number),
    }


def available_cores() -> int:
    """The number of cores that this process may use."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_ranks(ranks: int) -> dict[str, str]:
    """The variable of each rank's threads: as the user has set it, or its part of the cores."""
    cores = str(max(1, available_cores() // ranks))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", cores)}


def default_environment(ranks: int) -> dict[str, str]:
    """Further environment variables of a rank, without those that the user has set."""
    variables = threads_of_ranks(ranks)
    if platform.system() in LOOPBACK:
        # Otherwise gloo listens on the address that the host's name resolves to.
        variables["GLOO_SOCKET_IFNAME"] = LOOPBACK[platform.system()]
    return {name: value for name, value in variables.items() if name not in os.environ}
