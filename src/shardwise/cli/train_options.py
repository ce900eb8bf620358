"""The options of ``shardwise train`` beside a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """Processes, restarts, a simulated crash, more output.

    ``force`` and ``machines`` are those of ``Foresight``; ``timeout`` is that of ``connect``.
    """

    nproc: int | None
    restarts: int | None
    kill_rank: tuple[int, int] | None
    verbose: bool
    force: bool = False
    machines: Path | None = None
    timeout: float | None = None
