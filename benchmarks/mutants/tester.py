"""A process that tries one mutant after another, each in a fork that has imported torch already.

Run as a script in a copy of the project, of which it may change files, with the names of modules
to import as arguments. An order is a line of JSON on standard input, its verdict a line on standard
output. It imports nothing of the package itself, so that each fork imports the mutant.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

NO_TESTS = 5  # pytest's exit status
PAUSE = 0.02  # seconds between two looks at whether a run has ended


@dataclass(frozen=True)
class Order:
    """One mutant, and the tests that shall notice it."""

    file: str  # below the project's root
    code: str  # with the change
    stages: list[tuple[list[str], str]]  # files of tests, and pytest's ``-m``
    test_limit: float  # seconds that one test may take
    limit: float  # seconds that all may take together


def main() -> None:
    """Follow orders until standard input ends."""
    for name in sys.argv[1:]:
        import_module(name)
    gc.collect()
    gc.freeze()  # or every fork copies what it collects
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number, line in enumerate(sys.stdin):
        order = Order(**json.loads(line))
        path = Path(order.file)
        code = path.read_text("utf-8")
        _write(path, order.code, 2 * number)
        failed = _failed(order)
        _write(path, code, 2 * number + 1)
        print(json.dumps(failed), file=answers, flush=True)


def _write(path: Path, code: str, number: int) -> None:
    """With another time of change for each version: compiled files are found by it."""
    path.write_text(code, "utf-8")
    os.utime(path, (number, number))


def _failed(order: Order) -> str:
    """The tests of the first stage that failed, ``""`` if all passed."""
    deadline = time.monotonic() + order.limit
    for files, marks in order.stages:
        limits = [f"--timeout={order.test_limit}", "--timeout-method=thread"]
        plain = ["-o", "faulthandler_timeout=0", "-p", "no:cacheprovider", "--assert=plain"]
        if not _pass(["-x", "-q", "-m", marks, *limits, *plain, *files], deadline):
            return f"{' '.join(files)} -m '{marks}'"
    return ""


def _pass(arguments: list[str], deadline: float) -> bool:
    """Does pytest end well in a fork of this process before the deadline?"""
    child = os.fork()
    if child == 0:
        _run_pytest(arguments)
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) in (0, NO_TESTS)
            time.sleep(PAUSE)
        return False
    finally:
        _end_group(child)


def _run_pytest(arguments: list[str]) -> None:
    """Never returns."""
    status: Any = 1
    try:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        import pytest

        status = int(pytest.main(arguments))
    finally:
        os._exit(status)


def _end_group(child: int) -> None:
    """Kill the fork and the processes that its tests have started."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return


if __name__ == "__main__":
    main()
