"""The destination of a conversion: a new checkpoint's folder arrives there complete or not at all.

files in full size → tensors, block by block → what every save ends with (``checkpoint.publish``)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.disk import check_room, explained, sync_folder
from shardwise.checkpoint.folder import Partial, check_replaceable, leftovers, new_token
from shardwise.checkpoint.lock import is_alive
from shardwise.checkpoint.plan import Entry, FilePlan, Held, index_files
from shardwise.checkpoint.publish import publish_files
from shardwise.checkpoint.recognise import step_of, strangers
from shardwise.checkpoint.run_folder import read_manifest
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.checkpoint.writer import Chunk, Writer, allocate
from shardwise.errors import CheckpointError

Progress = Callable[[int, int], object]
"""Called with the bytes that were written since the last call, and the total."""


def no_progress(_done: int, _total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Converted:
    """A report of what was written."""

    path: Path
    tensors: int  # how many, with optimizer state if there is any
    nbytes: int  # how large they are
    files: tuple[str, ...] = ()  # names of those with tensors
    cast: tuple[str, ...] = ()  # names of tensors that were cast
    small: tuple[str, ...] = ()  # names of others
    left_out: tuple[str, ...] = ()  # names of what has no place in the result


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """A tensor of which this process has every element."""
    numel = prod(shape)
    return Entry(name, dtype, shape, (Held(0, numel, (0,)),) if numel else ())


def write_folder(
    final: Path,
    plans: Mapping[str, Sequence[FilePlan]],
    chunks_of: Callable[[str, FilePlan], Iterator[Chunk]],
    small: Mapping[str, bytes],
    facts: Mapping[str, Any],
    progress: Progress = no_progress,
) -> Converted:
    """Write a checkpoint, which gets its name when it is complete.

    Args:
        plans: the files of each stem, whose bytes ``chunks_of`` yields in order.
        small: the other files, by name; indices are added.
        facts: fields of the manifest: all but token, time, versions and files.
    """
    small = {**small, **index_files(plans)}
    files = [plan for stem in plans for plan in plans[stem]]
    chunks = (chunk for stem in plans for plan in plans[stem] for chunk in chunks_of(stem, plan))
    with explained(f"making a folder beside {final}"):
        check_replaceable(final)
        clear(final)
        partial = Partial.make(final, new_token())
    try:
        with explained(f"writing {final.name}"):
            allocate(partial.path, files, sum(map(len, small.values())) + (1 << 20))
            total = sum(file.size - len(file.header) for file in files)
            with Writer(partial.path, 0, total) as writer:
                for chunk in chunks:
                    writer.write(chunk)
                    progress(chunk.stop - chunk.start, total)
                part = writer.finish()
        publish_files(partial, files, [part], small, {**facts, "token": new_token()})
    except BaseException:
        partial.abandon()
        raise
    nbytes, tensors = sum(file.size for file in files), sum(len(file.tensors) for file in files)
    return Converted(final, tensors, nbytes, tuple(file.name for file in files), small=tuple(small))


@dataclass(frozen=True)
class Destination:
    """The place that a result is written to."""

    path: Path  # absolute
    form: Literal["hf", "dcp", "pt"] = "hf"  # safetensors, torch's DCP, or one file of torch
    whole: bool = False  # with optimizer and training state
    overwrite: bool = False  # an earlier result of that name may be replaced

    def check(self, source: Path | None = None) -> None:
        """Raises ``CheckpointError`` if the export of the folder ``source`` may not go here."""
        with explained(f"looking at {self.path}", reads=True):
            self._check_name(source)
            if self.form == "hf":
                check_replaceable(self.path)
            is_empty = self.path.is_dir() and not any(self.path.iterdir())
            if self.path.exists() and not (self.form == "hf" and is_empty):
                self._check_replaced()

    def take(self, unfinished: Path) -> None:
        """Give the finished file or folder this name, if no other process took it meanwhile."""
        self.check()
        with explained(f"writing {self.path}"):
            unfinished.replace(self.path)
            sync_folder(self.path.parent)

    def _refuse(self, applies: object, reason: str) -> None:
        if applies:
            raise CheckpointError(f"{self.path} {reason}")

    def _check_name(self, source: Path | None) -> None:
        path = self.path
        self._refuse(path.is_symlink(), "is a link. Name the place itself, or remove the link.")
        self._refuse(
            step_of(path.name) is not None and not (self.whole and self.form == "hf"),
            "is the name of a run's checkpoint, which `resume` would load, and this result is "
            "none. Choose another name, or pass --with-optimizer (without --format).",
        )
        self._refuse(
            source is not None and path.resolve().is_relative_to(source.resolve()),
            "is, or is in, the checkpoint that is exported. Name a folder elsewhere.",
        )

    def _check_replaced(self) -> None:
        path, form = self.path, self.form
        self._refuse(
            not self.overwrite or form == "dcp" or (form == "pt" and not path.is_file()),
            "is there already, and is left as it is. Name another, or pass --overwrite to replace "
            "an earlier export (of safetensors, or one file) when the new one is complete.",
        )
        if form == "pt":
            return
        manifest = read_manifest(path)
        listed = set() if manifest is None else {*manifest.files}
        others = strangers(path, listed)
        self._refuse(
            others,
            f"also holds {', '.join(others[:8])}, which is not part of the export and would be "
            "deleted. Move it elsewhere, or name another folder.",
        )
        self._refuse(
            TRAINING in listed and not self.whole,
            "holds optimizer and training state, and weights alone would replace it. Name another "
            "folder, or pass --with-optimizer.",
        )


def clear(final: Path) -> None:
    """Remove what killed exports to this name left, and nothing else."""
    for left in leftovers(final.parent) if final.parent.is_dir() else []:
        if (left.kind, left.name) == ("partial", final.name) and not is_alive(left.path):
            shutil.rmtree(left.path, ignore_errors=True)


@contextmanager
def workplace(final: Path, needed: int = 0) -> Iterator[Path]:
    """A hidden folder beside ``final``, with room for ``needed`` bytes, removed with the block.

    It is locked like a checkpoint that is being written, so the next export to the same name
    removes what a killed process left.
    """
    hidden = final.with_name(f".{final.name}.unfinished")
    with explained(f"making a folder beside {final}"):
        clear(hidden)
        partial = Partial.make(hidden, new_token())
    try:
        with explained(f"looking at the disk of {final}", reads=True):
            check_room(final.parent, needed, f"what {final.name} takes while it is written")
        yield partial.path
    finally:
        partial.abandon()
