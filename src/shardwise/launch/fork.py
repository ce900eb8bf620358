"""A process forked from this one: it has what is imported here, and shares that memory.

Each new interpreter imports torch and this package anew: 1.7 s of processor time, and 130 MiB of
its own. A fork has only the thread that forks, so what another one holds stays held in it for
ever: there must be no other (``can_fork``). It is to its launcher what a new interpreter is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
ARGUMENTS = slice(45, 47)  # of /proc/self/stat after the name: where a command line lies in memory


def can_fork() -> bool:
    """Has this process one thread? Those of OpenBLAS do not count: it ends them at a fork."""
    if platform.system() != "Linux":
        return False
    if not (child := os.fork()):
        os._exit(0)
    with suppress(ChildProcessError):  # nobody learns of it where SIGCHLD is ignored
        os.waitpid(child, 0)
    return len([*Path("/proc/self/task").iterdir()]) == 1


def end_with_parent() -> None:
    """Kill this process when its parent dies, also while it is suspended. On Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Fork:
    """Runs ``main`` in a process, in a session of its own, which dies with this one.

    As ``subprocess.Popen``, it keeps no open files but the standard ones and ``file``, no handlers
    of signals, and is seen as ``command`` by others; its environment is ``environ``. What was
    written and not flushed before is written by both.
    """

    def __init__(
        self,
        main: Callable[[], object],
        command: Sequence[str],
        environ: Mapping[str, str],
        file: int,
    ) -> None:
        self.returncode: int | None = None
        environ, parent, (ready, starting) = {**environ}, os.getpid(), os.pipe()
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if not self.pid:
            try:
                end_with_parent()
                if os.getppid() == parent:  # else it has died meanwhile
                    _run(main, command, environ, file, signals)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.close(starting)
        os.read(ready, 1)  # until it has closed its end, and so has its session and its handlers
        os.close(ready)

    def poll(self) -> int | None:
        """The status, as of ``subprocess.Popen``; ``None`` while it runs."""
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        """The status, when it has ended."""
        return self._status(0)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the same
                ended, status = self.pid, 0
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


# --- in the new process ----------------------------------------------------------------------


def _run(
    main: Callable[[], object],
    command: Sequence[str],
    environ: Mapping[str, str],
    file: int,
    signals: set[int],
) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environ)
        _set_title(command)
        _forget_handlers()
        _forget_random_state()
        _close_files_but(file)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        status = _status_of(main)
        # What an interpreter does at its end; the frames below belong to the parent.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


def _status_of(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            os.write(2, f"{end.code}\n".encode())
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        return 1
    return 0


def _forget_handlers() -> None:
    """Reset what is handled; what is ignored stays so, as after ``exec``."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it has nothing to save yet


def _forget_random_state() -> None:
    """Seed anew what would be alike; Python's own does so itself, torch's always starts alike."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def _close_files_but(file: int) -> None:
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != file:
            with suppress(OSError):  # of the listing itself
                os.close(number)


def _set_title(command: Sequence[str]) -> None:
    """Show ``ps`` and ``pkill`` as much of ``command`` as fits in place of the parent's.

    A signal for the launcher alone, which forwards it, would else reach each rank twice.
    """
    ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(Path(command[0]).name))
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ARGUMENTS])
    if size := end - start:  # bytes; 0 where the kernel does not tell
        title = b"\0".join(map(os.fsencode, command))[: size - 1]
        ctypes.memmove(start, title.ljust(size, b"\0"), size)
