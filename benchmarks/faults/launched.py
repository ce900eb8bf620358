"""The training run under the project's own launcher, which is then killed.

Nothing of it is forked from here: the launcher is a process as a user starts it, and so are its
ranks. A rank kills the launcher and then stays where it is for a minute, unless somebody ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.faults.case import Case
from benchmarks.faults.server import RANKS, Attempt
from benchmarks.faults.training import Final

LAUNCH = (
    "import sys; from shardwise.launch.launcher import start; start(sys.argv[2:], int(sys.argv[1]))"
)
DEADLINE = 5.0  # seconds for which a rank may outlive its launcher
LOOK = 0.01


def launched(run: Path, case: Case) -> Attempt:
    """Launch the run, wait until the launcher has ended, and then until its ranks have."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder), time.monotonic()
        training = [sys.executable, "-m", "benchmarks.faults.training"]
        command = [*training, str(run), TypeAdapter(Case).dump_json(case).decode(), str(out)]
        launcher = subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-c", LAUNCH, str(RANKS), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        over = time.monotonic()
        lived = [rank for rank in range(RANKS) if _lives(out / f"{rank}.pid", over + DEADLINE)]
        return Attempt(
            (launcher.returncode,) * RANKS,
            tuple(Final.read(out / f"{rank}.json") for rank in range(RANKS)),
            (launcher.stderr[-2000:],) * RANKS,
            over - begin,
            time.monotonic() - over,
            tuple(lived),
        )


def _lives(path: Path, deadline: float) -> bool:
    """Does the rank still live at the deadline? If so, it is ended."""
    pid = int(path.read_text())
    while time.monotonic() < deadline:
        if _has_ended(pid):
            return False
        time.sleep(LOOK)
    os.kill(pid, signal.SIGKILL)
    return True


def _has_ended(pid: int) -> bool:
    """Is it gone, or a zombie that nobody has waited for?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
