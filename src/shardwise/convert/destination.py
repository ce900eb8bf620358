"""Where an export goes: what may be replaced there, and where it is written until it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.checkpoint.disk import check_room, explained
from shardwise.checkpoint.folder import (
    Partial,
    check_replaceable,
    leftovers,
    new_token,
    step_of,
)
from shardwise.checkpoint.lock import LOCK, is_alive
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.run_folder import read_manifest
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Destination:
    """A path that somebody named for a result, and what they allowed.

    Attributes:
        path: absolute.
        form: a folder of safetensors, a folder of torch's DCP, or one file of torch.
        whole: is all that a run needs to go on written there, and not weights alone?
        overwrite: an earlier result of that name may be replaced.
    """

    path: Path
    form: Literal["hf", "dcp", "pt"] = "hf"
    whole: bool = False
    overwrite: bool = False

    def check(self, source: Path | None = None) -> None:
        """May the result be written here?

        Args:
            source: the folder of the checkpoint that is exported, if it is one of ours.
        """
        with explained(f"looking at {self.path}", reads=True):
            self._check_name(source)
            if self.form == "hf":
                check_replaceable(self.path)
            is_empty = self.path.is_dir() and not any(self.path.iterdir())
            if self.path.exists() and not (self.form == "hf" and is_empty):
                self._check_replaced()

    def _check_name(self, source: Path | None) -> None:
        path = self.path
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link, to {path.readlink()}; replacing it would leave what it leads "
                "to as it is. Name the place itself, or remove the link."
            )
        if step_of(path.name) is not None and not (self.whole and self.form == "hf"):
            raise CheckpointError(
                f"{path.name!r} is what a run calls a checkpoint that it can go on from, and this "
                "result is none: `resume` would take it up and fail. Choose another name, or pass "
                "--with-optimizer (without --format)."
            )
        if source is not None and path.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(
                f"{path} is, or is in, the checkpoint that is exported, which stays as it is. Name "
                "a folder elsewhere."
            )

    def _check_replaced(self) -> None:
        path, form = self.path, self.form
        if not self.overwrite or form == "dcp" or (form == "pt" and not path.is_file()):
            raise CheckpointError(
                f"{path} is there already, and is left as it is. Name another, or pass --overwrite "
                "to replace an earlier export (of safetensors, or one file) when the new one is "
                "complete."
            )
        if form == "pt":
            return
        manifest = read_manifest(path)
        listed = set() if manifest is None else {*manifest.files, MANIFEST, LOCK}
        if strangers := sorted(p.name for p in path.iterdir() if p.name not in listed):
            some = ", ".join(strangers[:8]) + (", …" if len(strangers) > 8 else "")
            raise CheckpointError(
                f"{path} also holds {some}, which is not part of the export and would be deleted. "
                "Move it elsewhere, or name another folder."
            )
        if TRAINING in listed and not self.whole:
            raise CheckpointError(
                f"{path} holds optimizer and training state, and weights alone would replace it. "
                "Name another folder, or pass --with-optimizer."
            )


def clear(final: Path) -> None:
    """Remove what exports to this name left that were killed; others' leftovers are theirs."""
    for left in leftovers(final.parent) if final.parent.is_dir() else []:
        if (left.kind, left.name) == ("partial", final.name) and not is_alive(left.path):
            shutil.rmtree(left.path, ignore_errors=True)


@contextmanager
def workplace(final: Path) -> Iterator[Path]:
    """A hidden folder beside ``final``, on the same disk, that goes with the block.

    It is locked as a checkpoint is that is being written, so the next export to the same name
    knows and removes what a killed process left of it.
    """
    hidden = final.with_name(f".{final.name}.unfinished")
    with explained(f"making a folder beside {final}"):
        clear(hidden)
        partial = Partial.make(hidden, new_token())
    try:
        yield partial.path
    finally:
        partial.abandon()


def check_room_beside(final: Path, needed: int) -> None:
    """``check_room`` on the disk where ``final`` will be, whose parents need not be there yet."""
    folder = next(path for path in final.parents if path.is_dir())
    with explained(f"looking at the disk of {final}", reads=True):
        check_room(folder, needed, f"what {final.name} takes while it is written")
