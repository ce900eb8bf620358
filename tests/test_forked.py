"""A forked interpreter ends, speaks and inherits as a new one does; a test in a fork can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import forked

pytestmark = pytest.mark.spawn

COMMANDS = [
    ["-c", "import sys; print(__name__, sys.argv); sys.exit(3)", "a", "b"],
    ["-c", "import sys; sys.exit('no')"],
    ["-c", "import sys; print(sys.argv, file=sys.stderr); raise KeyError('x')"],
    ["-c", "import os; os.kill(os.getpid(), 2)"],
    ["-c", "import os; print('lost', end=''); os.kill(os.getpid(), 9)"],
    ["-c", "import atexit; atexit.register(print, 'the end'); print('before')"],
    ["-c", "import os; print(sorted(os.listdir('/proc/self/fd')), os.getcwd())"],
    ["-c", "import os; print(os.getsid(0) == os.getpid(), os.environ['WHERE'], len(os.environ))"],
    ["-c", "import signal; print([str(signal.getsignal(n)) for n in (10, 15)])"],
    ["-u", "-m", "json.tool", "--help"],
]


def outcomes(folder: Path) -> str:
    """Each command's status, output, and last line of errors."""
    results = []
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "WHERE": "here"},
            cwd=folder,
            start_new_session=True,
            capture_output=True,
            text=True,
            check=False,
        )
        results.append((command, done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    return "\n".join(map(str, results))


@forked
def write_outcomes(folder: Path) -> None:
    (folder / "outcomes").write_text(outcomes(folder))


def test_a_forked_interpreter_does_as_a_new_one(tmp_path: Path) -> None:
    write_outcomes(folder=tmp_path)
    assert (tmp_path / "outcomes").read_text().splitlines() == outcomes(tmp_path).splitlines()


@forked
def test_it_has_imported_torch_already() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"True\n"


@forked
def fail() -> None:
    assert len(sys.argv) < 0


def test_what_fails_in_a_fork_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="AssertionError"):
        fail()
