"""A run's folder as somebody finds it: its checkpoints, which are whole, and what a crash left.

Nothing here changes anything: what is broken is named and stays, for a person to look at.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.complete import check_complete, newest, read_manifest
from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import (
    LOCK,
    Leftover,
    is_alive,
    leftovers,
    step_of,
    steps,
    target_of,
)
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.errors import CheckpointError

__all__ = ["Listed", "Run", "checkpoint_of", "folder_of_run", "survey"]

log = logging.getLogger("shardwise")

CHECKPOINTS = "checkpoints"
YOUNG = 2.0  # seconds; a lock that is just being taken is not touched


@dataclass(frozen=True)
class Listed:
    """One folder ``step-N`` of a run.

    Attributes:
        path: where it is.
        step: its number.
        nbytes: of its files, as they are on the disk.
        manifest: who wrote it, if that can be read.
        problem: why it is not complete; empty if it is.
    """

    path: Path
    step: int
    nbytes: int
    manifest: Manifest | None
    problem: str


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        folder: the one that holds the checkpoints.
        checkpoints: the newest first.
        latest: the name that ``latest`` points at, if it does.
        leftovers: folders that are no checkpoints, each with whether it is being written now.
    """

    folder: Path
    checkpoints: tuple[Listed, ...]
    latest: str | None
    leftovers: tuple[tuple[Leftover, bool], ...]


def folder_of_run(path: Path) -> Path | None:
    """The folder that holds a run's checkpoints, if ``path`` is a run: itself, or one in it."""
    with explained(f"looking into {path}"):
        if not path.is_dir() or (path / NAME).exists():
            return None
        for folder in (path, path / CHECKPOINTS):
            if folder.is_dir() and (steps(folder) or leftovers(folder)):
                return folder
    return None


def survey(folder: Path) -> Run:
    """Look at every checkpoint in ``folder``: at names and sizes, not at bytes."""
    with explained(f"looking into {folder}"):
        left = tuple((found, _is_being_written(found)) for found in leftovers(folder))
        return Run(folder, tuple(map(_listed, steps(folder))), target_of(folder), left)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that ``path`` means: the newest complete one of a run, or itself.

    Raises:
        CheckpointError: a run has no complete checkpoint.
    """
    folder = folder_of_run(path)
    if folder is None:
        return path
    found = newest(folder)
    for broken, reason in found.skipped:
        log.warning("SKIPPED %s, which is not complete: %s", broken, reason)
    if found.path is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {len(found.skipped)} are broken. `shardwise "
            f"inspect {path}` lists them. Name another run."
        )
    return found.path


def _listed(path: Path) -> Listed:
    nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    manifest, problem = None, ""
    try:
        manifest = read_manifest(path)
        check_complete(path)
    except CheckpointError as error:
        problem = str(error)
    return Listed(path, step_of(path.name) or 0, nbytes, manifest, problem)


def _is_being_written(leftover: Leftover) -> bool:
    if leftover.kind != "partial":
        return False
    lock = leftover.path / LOCK
    try:
        if lock.exists() and time.time() - lock.stat().st_mtime < YOUNG:
            return True
        return is_alive(leftover.path)
    except OSError:  # it may not be opened here, or has just got its name
        return True
