"""A path on the command line: a run, one of its checkpoints, or the newest complete one.

Everything is found by names and sizes; no bytes of tensors are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import Leftover, checkpoints, leftovers, resolve, target_of
from shardwise.checkpoint.lock import is_alive
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.recognise import CHECKPOINTS, LATEST, files_in, step_of
from shardwise.checkpoint.run_folder import check_complete, read_manifest, saved_in
from shardwise.errors import CheckpointError
from shardwise.train.records import plural

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a run.

    Attributes:
        name: what it is called, also where a crash took its name away.
        path: where it is.
        step: as its manifest says, or its name.
        nbytes: of its files, as they are on the disk; 0 where that cannot be seen.
        manifest: who wrote it, if that can be read.
        problem: why it is not complete; empty if it is.
    """

    name: str
    path: Path
    step: int | None
    nbytes: int
    manifest: Manifest | None
    problem: str


@dataclass(frozen=True)
class Run:
    """Contents of a run's folder.

    Attributes:
        folder: the one that holds the checkpoints.
        checkpoints: the highest step first; of one step the one that was saved last.
        latest: the name that ``latest`` points at, if it does.
        leftovers: folders that are no checkpoints, each with whether it is being written now.
    """

    folder: Path
    checkpoints: tuple[Listed, ...]
    latest: str | None
    leftovers: tuple[tuple[Leftover, bool], ...]


def folder_of_run(path: Path) -> Path | None:
    """The folder that holds a run's checkpoints, if ``path`` is a run: itself, or one in it."""
    with explained(f"looking into {path}", reads=True):
        if not path.is_dir() or (path / NAME).exists():
            return None
        for folder in (path, path / CHECKPOINTS):
            if folder.is_dir() and (checkpoints(folder) or leftovers(folder)):
                return folder
    return None


def survey(folder: Path) -> Run:
    """Look at every checkpoint in ``folder``: at names and sizes, not at bytes."""
    with explained(f"looking into {folder}", reads=True):
        left_over = tuple(
            (leftover, leftover.kind == "partial" and is_alive(leftover.path))
            for leftover in leftovers(folder)
        )
        listed = sorted(map(_listed, checkpoints(folder)), key=_rank, reverse=True)
        return Run(folder, tuple(listed), target_of(folder), left_over)


def meant(path: Path) -> Path:
    """``RUN/final`` and ``RUN/latest`` mean those in ``RUN/checkpoints``, if RUN has none.

    Raises:
        CheckpointError: it is a folder of several runs.
    """
    inner = path.parent / CHECKPOINTS
    is_one = path.name == LATEST or step_of(path.name) is not None or (inner / path.name).is_dir()
    with explained(f"looking for {path}", reads=True):
        exists = path.exists() or path.is_symlink() or not inner.is_dir()
        if is_one and not exists:
            return inner / path.name
        if runs := _runs_in(path):
            first = ", ".join(runs[:8]) + ", …" * (len(runs) > 8)
            raise CheckpointError(
                f"{path} is a folder of {plural(len(runs), 'run')}: {first}. Name one of them, "
                f"such as {path / runs[0]}."
            )
        return path


def _runs_in(folder: Path) -> list[str]:
    """Names of runs, in a folder that is neither a run nor a checkpoint itself."""
    if not folder.is_dir() or folder_of_run(folder) is not None:
        return []
    if (folder / NAME).exists() or any(folder.glob("*.safetensors")):
        return []
    return sorted(path.name for path in folder.iterdir() if folder_of_run(path) is not None)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that ``path`` means: the newest complete one of a run, or itself.

    Raises:
        CheckpointError: a run has no complete checkpoint.
    """
    path = meant(path)
    folder = folder_of_run(path)
    if folder is None:
        return path
    checkpoints = saved_in(folder)
    for broken, reason in checkpoints.skipped:
        log.warning("SKIPPED %s, which is not complete: %s", broken, reason)
    if not checkpoints.complete:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {len(checkpoints.skipped)} are broken. "
            f"`shardwise inspect {path}` lists them. Name another run."
        )
    return checkpoints.complete[0].path


def _listed(path: Path) -> Listed:
    """``path`` has the name of a checkpoint; one that lost it is found under another."""
    folder, nbytes, manifest, problem = path, 0, None, ""
    try:
        with explained(f"looking into {path}", reads=True):
            folder = resolve(path)
            nbytes = sum(file.stat().st_size for file in files_in(folder).values())
            manifest = read_manifest(folder)
            check_complete(folder)
    except CheckpointError as error:
        problem = str(error)
    step = step_of(path.name) if manifest is None else manifest.step
    return Listed(path.name, folder, step, nbytes, manifest, problem)


def _rank(listed: Listed) -> tuple[int, str, str]:
    manifest = listed.manifest
    return (
        -1 if listed.step is None else listed.step,
        manifest.created if manifest else "",
        listed.name,
    )
