"""Programs as a user starts them: by Python, which spawns ranks, or by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLES", "lines_of", "run", "torchrun"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: object, folder: Path, path: Path | None = None) -> list[str]:
    """What ``python ARGUMENTS`` prints, in lines; ``path`` is searched for modules first."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if path:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def torchrun(*arguments: object, folder: Path) -> list[str]:
    """The same under ``torchrun``, on two ranks."""
    options = ("--standalone", "--nproc-per-node", 2)
    return run("-m", "torch.distributed.run", *options, *arguments, folder=folder)


def lines_of(document: str) -> str:
    """A page of the documents."""
    return (EXAMPLES.parent / "docs" / document).read_text("utf-8")
