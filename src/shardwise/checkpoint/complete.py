"""Is a checkpoint complete? And which is the newest that is?

A look, not a reading: the manifest is whole, and every file that it lists is there in its size.
Whether their bytes are those that were written shows when they are read. The newest is the one that
was saved last, as the manifests say: a run that went back to an earlier step has lower numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.disk import retried, size_of
from shardwise.checkpoint.folder import resolve, steps_to_resume
from shardwise.checkpoint.manifest import CAP, NAME, Manifest
from shardwise.checkpoint.names import inside
from shardwise.errors import CheckpointError, DamagedCheckpoint

__all__ = ["Checkpoint", "Found", "check_complete", "read_manifest", "saved_in"]


class Checkpoint(NamedTuple):
    """A complete one: its folder ``step-N``, and what it consists of."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Found:
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
    found = read_manifest(folder)
    if found is None:
        raise DamagedCheckpoint(
            f"{folder} has no {NAME}, so it was not written to its end, or not by shardwise. Load "
            "another checkpoint."
        )
    wrong = []
    for name, record in found.files.items():
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
    return found


def saved_in(run: Path) -> Found:
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
    return Found(tuple(complete), tuple(skipped))


def _named_in(run: Path) -> list[Path]:
    return retried(f"looking into {run}", partial(steps_to_resume, run))
