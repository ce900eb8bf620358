"""Programs of other libraries on several ranks, each a process, as a launcher starts them.

They are forked from one process that has imported these libraries: that takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import forked
from tests.ranks import free_port

__all__ = ["on_ranks"]


@forked
def on_ranks(module: str, imports: str, jobs: list[tuple[int, str]], folder: Path) -> None:
    """Run ``python -m module JOB FOLDER`` on as many ranks as each job says, after ``imports``."""
    exec(imports, {})
    for world, job in jobs:
        port = str(free_port())
        # Files, for a pipe that is read after another rank has ended may be full before.
        outputs = [folder / f"{job}-{rank}-of-{world}.txt" for rank in range(world)]
        ranks = list[subprocess.Popen[bytes]]()
        for rank, path in enumerate(outputs):
            with path.open("wb") as output:
                command = [sys.executable, "-m", module, job, str(folder)]
                env = {**os.environ, **_launched(rank, world, port)}
                ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
        for process, path in zip(ranks, outputs, strict=True):
            assert process.wait(timeout=120) == 0, path.read_text("utf-8")


def _launched(rank: int, world: int, port: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in numbers.items()} | group
