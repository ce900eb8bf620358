"""Tests of commands: ``python …`` is forked there, without the seconds that its imports take.

A test marked ``@forked`` runs in a process of its own, in which ``subprocess`` forks where it is
told to start this Python. What such a process starts is forked as well: both launchers, and their
ranks. Of each command one test starts a new interpreter all the same; that of ``train`` is in
``make prove``.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from multiprocessing import resource_tracker
from typing import IO, Any, NoReturn

import pytest

from tests.ranks import outcomes_of


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test`` in a process whose interpreters are forked. Its fixtures must be picklable."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        name = test.__module__, test.__qualname__
        (outcome,) = outcomes_of(1, _in_fork, *name, dict(os.environ), fixtures)
        if outcome.error:
            pytest.fail(outcome.error, pytrace=False)

    return run


def _in_fork(
    rank: int, world: int, folder: str, module: str, name: str, env: dict[str, str], fixtures: Any
) -> None:
    _set_environment(env)
    subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_OPTIONS = inspect.signature(_start)


def _fork(process: Any, *given: Any) -> None:
    """A fork in place of ``Popen._execute_child``."""
    options = _OPTIONS.bind(process, *given).arguments
    command = [os.fspath(word) for word in options["args"]]
    if command[0] != sys.executable:
        _start(process, *given)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the threads, which end here
        process.pid = os.fork()
    if process.pid == 0:
        _become(command[1:], options)
    process._child_created = True
    streams = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(options[stream] for stream in streams))


def _become(arguments: Sequence[str], options: dict[str, Any]) -> NoReturn:
    """What ``exec`` would leave of this process, with ``python *arguments`` in it."""
    status = 1
    try:
        for fd, stream in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if options[stream] != -1:
                os.dup2(options[stream], fd)
        _close_others(options["pass_fds"])
        if options["start_new_session"]:
            os.setsid()
        if options["cwd"] is not None:
            os.chdir(options["cwd"])
        if options["env"] is not None:
            _set_environment(options["env"])
        sys.stdout = _stdout()
        _forget_handlers()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent's folders
        status = _ended(arguments)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _stdout() -> TextIOWrapper:
    """A stream of its own: the parent's may be of a file, whose place it asks for when changed."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary: IO[bytes] = open(1, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return TextIOWrapper(binary, "utf-8", write_through=unbuffered)


def _set_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _close_others(kept: Sequence[int]) -> None:
    """All files but the three standard ones and ``kept``."""
    last = 2
    for fd in sorted(kept):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    # That of the process before; a program that spawns ranks starts one of its own.
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)


def _forget_handlers() -> None:
    """Signals that were handled are not; what is ignored stays so."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            normal = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, normal)


def _ended(arguments: Sequence[str]) -> int:
    """Run a command line of Python, and return its status."""
    try:
        _interpret(list(arguments))
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        return 1
    return 0


def _interpret(arguments: list[str]) -> None:
    while arguments[0] == "-u":
        del arguments[0]
    kind = arguments[0]
    sys.argv = arguments if kind not in ("-m", "-c") else [kind, *arguments[2:]]
    if kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")
