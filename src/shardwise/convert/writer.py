"""A new checkpoint's folder, written by this process alone, whole or not at all.

files in full size → tensors, block by block → headers → small files → manifest → rename
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import checksum
from shardwise.checkpoint.disk import explained, sync_folder, write_file
from shardwise.checkpoint.folder import Partial, new_token, publish
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.manifest import FileRecord, Manifest, record_of
from shardwise.checkpoint.plan import BLOCK, Entry, FilePlan, Held, index_of
from shardwise.checkpoint.writer import Chunk, Writer, allocate, pieces_of, write_header
from shardwise.convert.destination import clear
from shardwise.version import __version__

__all__ = ["INDEX", "Converted", "Progress", "entry_of", "write_folder"]

INDEX = ".safetensors.index.json"
Progress = Callable[[int, int], object]
"""Called with the bytes that were written since the last call, and all of them."""
_Files = Sequence[tuple[FilePlan, Callable[[FilePlan], Iterator[Chunk]]]]


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

    Raises:
        CheckpointError: the disk is full, or ``chunks_of`` raises it. Nothing is left behind.
    """
    small = {**small, **_indices(plans)}
    files = [(plan, partial(chunks_of, stem)) for stem in plans for plan in plans[stem]]
    token = new_token()
    with explained(f"making a folder beside {final}"):
        clear(final)
        unfinished = Partial.make(final, token)
    try:
        with explained(f"writing {final.name}"):
            records = _write(unfinished.path, files, small, progress)
            manifest = _manifest(facts, token, records)
            write_file(unfinished.path / MANIFEST, manifest.encode())
            sync_folder(unfinished.path)
            publish(unfinished)
    except BaseException:
        if unfinished.path.exists():
            unfinished.abandon()
        raise
    return Converted(
        final,
        sum(len(plan.tensors) for plan, _ in files),
        sum(plan.size for plan, _ in files),
        tuple(plan.name for plan, _ in files),
        small=tuple(small),
    )


def _indices(plans: Mapping[str, Sequence[FilePlan]]) -> dict[str, bytes]:
    """The index files of the stems that have several files, by name."""
    return {
        f"{stem}{INDEX}": json.dumps(index_of(files), indent=2).encode() + b"\n"
        for stem, files in plans.items()
        if len(files) > 1
    }


def _write(
    folder: Path, files: _Files, small: Mapping[str, bytes], progress: Progress | None
) -> dict[str, FileRecord]:
    plans = [plan for plan, _ in files]
    allocate(folder, plans, sum(map(len, small.values())) + (1 << 20))  # and the manifest
    total = sum(plan.size - len(plan.header) for plan in plans)
    with Writer(folder, 0, total) as writer:
        for plan, chunks in files:
            for chunk in chunks(plan):
                writer.write(chunk)
                if progress is not None:
                    progress(chunk.stop - chunk.start, total)
        part = writer.finish()
    records = {}
    for plan in plans:
        pieces = [*write_header(folder, plan), *pieces_of([part], plan.name)]
        blocks = checksum.block_checksums(pieces, plan.size, plan.name)
        records[plan.name] = record_of(blocks, plan.size)
    for name, data in small.items():
        write_file(folder / name, data)
        records[name] = record_of(checksum.of_bytes(data), len(data))
    return records


def _manifest(facts: Mapping[str, Any], token: str, records: dict[str, FileRecord]) -> Manifest:
    versions = {"shardwise": __version__, "torch": torch.__version__}
    filled = {
        "token": token,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "versions": {**versions, "python": platform.python_version()},
        "files": records,
        "block": BLOCK,
    }
    return Manifest(**{**facts, **filled})
