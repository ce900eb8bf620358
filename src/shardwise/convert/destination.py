"""Where an export goes: what may be replaced there, and where it is written until it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.complete import read_manifest
from shardwise.checkpoint.disk import explained, free_bytes
from shardwise.checkpoint.folder import (
    Partial,
    check_replaceable,
    leftovers,
    new_token,
    step_of,
)
from shardwise.checkpoint.lock import LOCK, is_alive
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.errors import CheckpointError
from shardwise.listing import size

__all__ = ["Destination", "check_room", "clear", "workplace"]


@dataclass(frozen=True)
class Destination:
    """A path that somebody named for a result, and what they allowed.

    Attributes:
        path: absolute.
        whole: is all that a run needs to go on written there, and not weights alone?
        overwrite: an earlier result of that name may be replaced.
    """

    path: Path
    whole: bool = False
    overwrite: bool = False

    @classmethod
    def of(cls, path: str | Path, whole: bool = False, overwrite: bool = False) -> Destination:
        """The same, from a path as it was named."""
        return cls(Path(path).expanduser().absolute(), whole, overwrite)

    def check_folder(self, source: Path | None = None) -> None:
        """May a checkpoint be written here?

        Args:
            source: the folder of the checkpoint that is exported, if it is one of ours.

        Raises:
            CheckpointError: what is there is not an earlier export, or the name is a run's.
        """
        with explained(f"looking at {self.path}", reads=True):
            self._check_link()
            self._check_name()
            self._check_outside(source)
            check_replaceable(self.path)
            if self.path.exists() and any(self.path.iterdir()):
                self._check_there()

    def check_file(self) -> None:
        """May one file be written here? Raises ``CheckpointError`` if not."""
        with explained(f"looking at {self.path}", reads=True):
            self._check_link()
            there = self.path.exists()
            if there and not (self.overwrite and self.path.is_file()):
                raise CheckpointError(
                    f"{self.path} is there already, and is left as it is. Name another file, or "
                    "pass --overwrite to replace a file."
                )

    def check_new(self) -> None:
        """Is nothing here, and the name free to take? Raises ``CheckpointError`` if not."""
        with explained(f"looking at {self.path}", reads=True):
            self._check_link()
            if self.path.exists():
                raise CheckpointError(
                    f"{self.path} is there already, and is left as it is. Name another."
                )
            if step_of(self.path.name) is not None:
                raise self._of_a_run()

    def _check_link(self) -> None:
        if self.path.is_symlink():
            raise CheckpointError(
                f"{self.path} is a link, to {self.path.readlink()}; replacing it would leave what "
                "it leads to as it is. Name the place itself, or remove the link."
            )

    def _check_name(self) -> None:
        if not self.whole and step_of(self.path.name) is not None:
            raise self._of_a_run()

    def _of_a_run(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name!r} is what a run calls a checkpoint that it can go on from, and this "
            "result is none: `resume` would take it up and fail. Choose another name, or pass "
            "--with-optimizer (without --format)."
        )

    def _check_outside(self, source: Path | None) -> None:
        if source is not None and self.path.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(
                f"{self.path} is, or is in, the checkpoint that is exported, which stays as it "
                "is. Name a folder elsewhere."
            )

    def _check_there(self) -> None:
        if not self.overwrite:
            raise CheckpointError(
                f"{self.path} is there already, and is left as it is. Name another folder, or pass "
                "--overwrite to replace it when the new one is complete."
            )
        manifest = read_manifest(self.path)
        listed = set() if manifest is None else {*manifest.files, MANIFEST, LOCK}
        strangers = sorted(path.name for path in self.path.iterdir() if path.name not in listed)
        if strangers:
            some = ", ".join(strangers[:8]) + (", …" if len(strangers) > 8 else "")
            raise CheckpointError(
                f"{self.path} also holds {some}, which is not part of the export and would be "
                "deleted. Move it elsewhere, or name another folder."
            )
        if TRAINING in listed and not self.whole:
            raise CheckpointError(
                f"{self.path} holds optimizer and training state, and weights alone would replace "
                "it. Name another folder, or pass --with-optimizer."
            )


def clear(final: Path) -> None:
    """Remove what exports to this name left that were killed; others' leftovers are theirs."""
    for left in leftovers(final.parent) if final.parent.is_dir() else []:
        if (left.kind, left.name) == ("partial", final.name) and not is_alive(left.path):
            shutil.rmtree(left.path, ignore_errors=True)


@contextmanager
def workplace(final: Path) -> Iterator[Path]:
    """A hidden folder beside ``final``, on the same disk, that goes with the block.

    It is locked as a checkpoint is that is being written. So what a killed process left of it, the
    next export to the same name knows for what it is, and removes.
    """
    hidden = final.with_name(f".{final.name}.unfinished")
    with explained(f"making a folder beside {final}"):
        clear(hidden)
        partial = Partial.make(hidden, new_token())
    try:
        yield partial.path
    finally:
        partial.abandon()


def check_room(final: Path, needed: int) -> None:
    """Raises ``CheckpointError`` where ``needed`` bytes beside ``final`` are more than are free."""
    folder = next(path for path in final.parents if path.is_dir())
    with explained(f"looking at the disk of {final}", reads=True):
        there = free_bytes(folder)
    if needed > there:
        raise CheckpointError(
            f"{final.name} needs {size(needed)} while it is written, and {folder} has "
            f"{size(there)} free, so it was not begun. Free space, or name another disk."
        )
