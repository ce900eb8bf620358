"""Programs as a user starts them: by Python, which spawns ranks, or by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["EXAMPLES", "lines_of", "run", "torchrun"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    *arguments: object, folder: Path, path: Path | None = None, by: Sequence[str] = ()
) -> list[str]:
    """What ``python ARGUMENTS`` prints, in lines; ``path`` is searched for modules first.

    Args:
        by: the command that starts Python.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if path:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [*by, sys.executable, *map(str, arguments)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def torchrun(*arguments: object, folder: Path) -> list[list[str]]:
    """The same under ``torchrun``, on two ranks: what each prints.

    Each prints into a file, since ``torchrun`` starts Python unbuffered: in one stream, a line of
    one rank may begin inside a line of the other.
    """
    with tempfile.TemporaryDirectory() as logs:
        options = ("--standalone", "--nproc-per-node", 2, "--log-dir", logs, "--redirects", 1)
        run("-m", "torch.distributed.run", *options, *arguments, folder=folder)
        files = sorted(Path(logs).glob("*/attempt_0/*/stdout.log"))
        return [file.read_text("utf-8").splitlines() for file in files]


def lines_of(document: str) -> str:
    """A page of the documents."""
    return (EXAMPLES.parent / "docs" / document).read_text("utf-8")
