"""A new checkpoint's folder, written by this process alone, whole or not at all.

files in full size → tensors, block by block → what every save ends with (``checkpoint.publish``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import Partial, new_token
from shardwise.checkpoint.plan import Entry, FilePlan, Held, index_files
from shardwise.checkpoint.publish import publish_files
from shardwise.checkpoint.writer import Chunk, Part, Writer, allocate
from shardwise.convert.destination import clear

Progress = Callable[[int, int], object]
"""Called with the bytes that were written since the last call, and all of them."""


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        path: the folder, or the one file.
        tensors: how many, with their optimizer state if there is any.
        nbytes: of all files that hold them.
        files: their names.
        cast: names of tensors that were cast.
        small: names of other files.
        left_out: names in the source that have no place in the result.
    """

    path: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def entry_of(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    """A tensor that this process has all of."""
    numel = prod(shape)
    return Entry(name, dtype, shape, (Held(0, numel, (0,)),) if numel else ())


def write_folder(
    final: Path,
    plans: Mapping[str, Sequence[FilePlan]],
    chunks_of: Callable[[str, FilePlan], Iterator[Chunk]],
    small: Mapping[str, bytes],
    facts: Mapping[str, Any],
    progress: Progress | None = None,
) -> Converted:
    """Write a checkpoint, which gets its name when it is complete.

    Args:
        plans: the files of each stem.
        chunks_of: yields the bytes of a stem's file, in order.
        small: bytes of the other files, by name; indices are added.
        facts: fields of the manifest: all but token, time, versions and files.
    """
    small = {**small, **index_files(plans)}
    files = [plan for stem in plans for plan in plans[stem]]
    chunks = (chunk for stem in plans for plan in plans[stem] for chunk in chunks_of(stem, plan))
    with explained(f"making a folder beside {final}"):
        clear(final)
        partial = Partial.make(final, new_token())
    try:
        with explained(f"writing {final.name}"):
            allocate(partial.path, files, sum(map(len, small.values())) + (1 << 20))
            part = _write(partial.path, files, chunks, progress)
        publish_files(partial, files, [part], small, {**facts, "token": new_token()})
    except BaseException:
        if partial.path.exists():
            partial.abandon()
        raise
    nbytes, tensors = sum(file.size for file in files), sum(len(file.tensors) for file in files)
    return Converted(final, tensors, nbytes, tuple(file.name for file in files), small=tuple(small))


def _write(
    folder: Path, files: Sequence[FilePlan], chunks: Iterator[Chunk], progress: Progress | None
) -> Part:
    total = sum(file.size - len(file.header) for file in files)
    with Writer(folder, 0, total) as writer:
        for chunk in chunks:
            writer.write(chunk)
            if progress is not None:
                progress(chunk.stop - chunk.start, total)
        return writer.finish()
