"""A run's folder: which of its checkpoints are complete, and which stay.

Complete means that the manifest is whole and every file that it lists has its size; bytes are
checked when they are read. The newest is the one that was saved last, as the manifests say: a run
that went back to an earlier step has lower numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.disk import retried, size_of
from shardwise.checkpoint.folder import checkpoints, remove, resolve
from shardwise.checkpoint.manifest import CAP, NAME, Manifest
from shardwise.checkpoint.safetensors_format import inside
from shardwise.errors import CheckpointError, DamagedCheckpoint


class Checkpoint(NamedTuple):
    """A complete checkpoint of a run."""

    path: Path
    manifest: Manifest


class SavedCheckpoints(NamedTuple):
    """The checkpoints of a run: complete ones, the newest first; others with the reason."""

    complete: tuple[Checkpoint, ...]
    skipped: tuple[tuple[Path, str], ...]


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


def manifest_lost(folder: Path) -> DamagedCheckpoint:
    """The error for a folder without a manifest that only shardwise can have made."""
    return DamagedCheckpoint(
        f"{folder} has no {NAME}, and shardwise began it, so it was not written to its end or was "
        "damaged since. Nothing of it was used. Load another checkpoint; or, for its weights as "
        "they are, one of its safetensors files."
    )


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
    """The checkpoints of a run; none where there is no such folder.

    The newest was saved last, as the manifests say. Of those that were saved at the same moment it
    is the one of the highest step, then the last by name.

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
    complete.sort(key=_moment, reverse=True)
    return SavedCheckpoints(tuple(complete), tuple(skipped))


def _moment(checkpoint: Checkpoint) -> tuple[str, int, str]:
    path, made = checkpoint
    return made.created, -1 if made.step is None else made.step, path.name


def _named_in(run: Path) -> list[Path]:
    return retried(f"looking into {run}", partial(checkpoints, run))


log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints stay."""

    limit: int  # how many, at least 1; those that stay in any case count
    # The one with the ``"lowest"`` or ``"highest"`` metric stays; or ``None``
    best: str | None = None
    tokens: Collection[str] = ()  # of those that stay in any case


def expired(complete: Sequence[Checkpoint], keep: Retention) -> list[Path]:
    """Return which of these checkpoints, newest first, are to be removed. Pure."""
    measured = [one for one in complete if one.manifest.metric is not None]
    measured.sort(key=lambda one: one.manifest.metric or 0.0, reverse=keep.best == "highest")
    staying = {one.path for one in complete if one.manifest.token in keep.tokens}
    staying |= {one.path for one in measured[:1] if keep.best}
    others = [one.path for one in complete if one.path not in staying]
    return others[max(keep.limit - len(staying), 0) :]


def apply_retention(run: Path, keep: Retention) -> tuple[str, ...]:
    """Remove old ones; returns their names. A failure is logged: the new one is complete."""
    removed = []
    try:
        complete = saved_in(run).complete
    except CheckpointError as error:
        log.warning("no old checkpoint of %s was removed: %s", run, error)
        return ()
    for path in expired(complete, keep):
        try:
            remove(path)
            removed.append(path.name)
        except OSError as error:
            log.warning("%s is no longer needed and could not be removed: %s", path, error)
    return tuple(removed)
