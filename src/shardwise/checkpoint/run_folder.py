"""A run's folder: which of its checkpoints are complete, which stay, and what a crash left.

A look, not a reading: the manifest is whole, and every file that it lists is there in its size.
Whether their bytes are those that were written shows when they are read. The newest is the one that
was saved last, as the manifests say: a run that went back to an earlier step has lower numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.disk import explained, retried, size_of
from shardwise.checkpoint.folder import (
    LATEST,
    Leftover,
    leftovers,
    remove,
    resolve,
    step_of,
    steps,
    steps_to_resume,
    target_of,
)
from shardwise.checkpoint.lock import is_alive
from shardwise.checkpoint.manifest import CAP, NAME, Manifest
from shardwise.checkpoint.safetensors_format import inside
from shardwise.errors import CheckpointError, DamagedCheckpoint


class Checkpoint(NamedTuple):
    """A complete one: its folder ``step-N``, and what it consists of."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class SavedCheckpoints:
    """What a run's folder holds under the names ``step-N``.

    Attributes:
        complete: the newest first.
        skipped: those that are not complete, each with the reason.
    """

    complete: tuple[Checkpoint, ...]
    skipped: tuple[tuple[Path, str], ...]

    @property
    def path(self) -> Path | None:
        """The newest complete one's."""
        return self.complete[0].path if self.complete else None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; ``None`` where there is none.

    Raises:
        DamagedCheckpoint: its bytes are not those that were written.
        CheckpointError: it is of a later version, or the disk does not let it be read.
    """
    path = inside(folder, NAME)

    def read() -> bytes | None:
        size = size_of(path)
        if size is not None and size > CAP:
            raise DamagedCheckpoint(
                f"{path} has {size:,} bytes, and no manifest has more than {CAP:,}. Load another "
                "checkpoint."
            )
        return None if size is None else path.read_bytes()

    data = retried(f"reading {path}", read)
    return None if data is None else Manifest.decode(data, str(path))


def check_complete(folder: Path) -> Manifest:
    """The manifest, if all that it lists is there in full size.

    Raises:
        DamagedCheckpoint: naming every file that is not.
        CheckpointError: as ``read_manifest`` does.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DamagedCheckpoint(
            f"{folder} has no {NAME}, so it was not written to its end, or not by shardwise. Load "
            "another checkpoint."
        )
    wrong = []
    for name, record in manifest.files.items():
        path = inside(folder, name)
        length = retried(f"looking at {path}", partial(size_of, path))
        if length != record.size:
            has = "is missing, and should have" if length is None else f"has {length:,} of"
            wrong.append(f"{name} {has} {record.size:,} bytes")
    if wrong:
        raise DamagedCheckpoint(
            f"{folder} is not complete: {'; '.join(wrong)}. Nothing of it was used. Load another "
            "checkpoint."
        )
    return manifest


def saved_in(run: Path) -> SavedCheckpoints:
    """The checkpoints ``step-N`` of a run; none where there is no such folder.

    Raises:
        CheckpointError: something there cannot be read, or a later version wrote it.
    """
    complete, skipped = [], []
    for path in _named_in(run):
        try:
            complete.append(Checkpoint(path, check_complete(resolve(path))))
        except CheckpointError as error:
            if path not in _named_in(run):
                continue  # another process has just removed it
            if not isinstance(error, DamagedCheckpoint):
                raise
            skipped.append((path, str(error)))
    complete.sort(key=lambda one: one.manifest.created, reverse=True)
    return SavedCheckpoints(tuple(complete), tuple(skipped))


def _named_in(run: Path) -> list[Path]:
    return retried(f"looking into {run}", partial(steps_to_resume, run))


log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Retention:
    """What stays.

    Attributes:
        limit: how many, at least 1; those that stay in any case count.
        best: the one with the ``"lowest"`` or ``"highest"`` metric stays; or ``None``.
        tokens: of those that stay in any case.
    """

    limit: int
    best: str | None = None
    tokens: Collection[str] = ()


def expired(complete: Sequence[Checkpoint], keep: Retention) -> list[Path]:
    """Which of these, the newest first, go. Pure."""
    measured = [one for one in complete if one.manifest.metric is not None]
    measured.sort(key=lambda one: one.manifest.metric or 0.0, reverse=keep.best == "highest")
    staying = {one.path for one in complete if one.manifest.token in keep.tokens}
    staying |= {one.path for one in measured[:1] if keep.best}
    others = [one.path for one in complete if one.path not in staying]
    return others[max(keep.limit - len(staying), 0) :]


def apply_retention(run: Path, keep: Retention) -> tuple[str, ...]:
    """Let old ones go; their names. That this fails is no reason to lose the new one."""
    gone = []
    try:
        complete = saved_in(run).complete
    except CheckpointError as error:
        log.warning("no old checkpoint of %s was removed: %s", run, error)
        return ()
    for path in expired(complete, keep):
        try:
            remove(path)
            gone.append(path.name)
        except OSError as error:
            log.warning("%s is no longer needed and could not be removed: %s", path, error)
    return tuple(gone)


CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Listed:
    """One folder ``step-N`` of a run.

    Attributes:
        path: where it is.
        step: its number.
        nbytes: of its files, as they are on the disk; 0 where that cannot be seen.
        manifest: who wrote it, if that can be read.
        problem: why it is not complete; empty if it is.
    """

    path: Path
    step: int
    nbytes: int
    manifest: Manifest | None
    problem: str

    @property
    def name(self) -> str:
        """What it is called, also where a crash took its name away."""
        return f"step-{self.step}"


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        folder: the one that holds the checkpoints.
        checkpoints: the highest step first.
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
            if folder.is_dir() and (steps(folder) or leftovers(folder)):
                return folder
    return None


def survey(folder: Path) -> Run:
    """Look at every checkpoint in ``folder``: at names and sizes, not at bytes."""
    with explained(f"looking into {folder}", reads=True):
        left = tuple(
            (leftover, leftover.kind == "partial" and is_alive(leftover.path))
            for leftover in leftovers(folder)
        )
        return Run(folder, tuple(map(_listed, steps_to_resume(folder))), target_of(folder), left)


def meant(path: Path) -> Path:
    """``RUN/step-100`` and ``RUN/latest`` mean those in ``RUN/checkpoints``, if RUN has none.

    Raises:
        CheckpointError: it is a folder of several runs.
    """
    inner = path.parent / CHECKPOINTS
    is_one = path.name == LATEST or step_of(path.name) is not None
    with explained(f"looking for {path}", reads=True):
        exists = path.exists() or path.is_symlink() or not inner.is_dir()
        if is_one and not exists:
            return inner / path.name
        if runs := _runs_in(path):
            some = ", ".join(runs[:8]) + ", …" * (len(runs) > 8)
            raise CheckpointError(
                f"{path} is a folder of {len(runs)} runs: {some}. Name one of them, such as "
                f"{path / runs[0]}."
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
    if checkpoints.path is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {len(checkpoints.skipped)} are broken. "
            f"`shardwise inspect {path}` lists them. Name another run."
        )
    return checkpoints.path


def _listed(path: Path) -> Listed:
    """``path`` has the name of a checkpoint; one that lost it is found under another."""
    folder, nbytes, manifest, problem = path, 0, None, ""
    try:
        with explained(f"looking into {path}", reads=True):
            folder = resolve(path)
            nbytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
            manifest = read_manifest(folder)
            check_complete(folder)
    except CheckpointError as error:
        problem = str(error)
    return Listed(folder, step_of(path.name) or 0, nbytes, manifest, problem)
