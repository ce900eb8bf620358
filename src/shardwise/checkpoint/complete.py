"""Is a checkpoint complete? And which is the newest that is?

A look, not a reading: the manifest is whole, and every file that it lists is there in its size.
Whether their bytes are those that were written shows when they are read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import resolve, steps, steps_to_resume
from shardwise.checkpoint.manifest import CAP, NAME, Manifest
from shardwise.checkpoint.names import inside
from shardwise.errors import CheckpointError

__all__ = ["Found", "check_complete", "metrics", "newest", "read_manifest"]


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint of a run, and what is newer and broken.

    Attributes:
        path: its folder, or ``None``.
        skipped: newer folders, newest first, each with the reason.
    """

    path: Path | None
    skipped: tuple[tuple[Path, str], ...]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; ``None`` where there is none.

    Raises:
        CheckpointError: it is damaged, or of a later version.
    """
    path = inside(folder, NAME)
    with explained(f"reading {path}", reads=True):
        if not path.is_file():
            return None
        if path.stat().st_size > CAP:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, and no manifest has more than {CAP:,}. "
                "Load another checkpoint."
            )
        data = path.read_bytes()
    return Manifest.decode(data, str(path))


def check_complete(folder: Path) -> Manifest:
    """The manifest, if all that it lists is there in full size.

    Raises:
        CheckpointError: naming every file that is not.
    """
    found = read_manifest(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} has no {NAME}, so it was not written to its end, or not by shardwise. Load "
            "another checkpoint."
        )
    wrong = []
    for name, record in found.files.items():
        path = inside(folder, name)
        length = path.stat().st_size if path.is_file() else None
        if length != record.size:
            has = "is missing, and should have" if length is None else f"has {length:,} of"
            wrong.append(f"{name} {has} {record.size:,} bytes")
    if wrong:
        raise CheckpointError(
            f"{folder} is not complete: {'; '.join(wrong)}. Nothing of it was used. Load another "
            "checkpoint."
        )
    return found


def newest(run: Path, broken: Collection[str] = ()) -> Found:
    """The newest complete checkpoint among the folders ``step-N`` of a run but ``broken`` ones."""
    skipped = []
    for path in steps_to_resume(run) if run.is_dir() else []:
        if path.name in broken:
            continue
        try:
            check_complete(resolve(path))
        except CheckpointError as error:
            skipped.append((path, str(error)))
        else:
            return Found(path, tuple(skipped))
    return Found(None, tuple(skipped))


def metrics(run: Path) -> list[tuple[Path, float | None]]:
    """The complete checkpoints of a run, the newest first, and how good each is."""
    found = []
    for path in steps(run):
        try:
            found.append((path, check_complete(path).metric))
        except CheckpointError:
            continue  # what is broken is left for a person to look at
    return found
