"""Publishing: rank 0 completes a folder and gives it its name when all tensors are on the disk.

headers → small files → manifest → rename → folder: the end of each save, export and import.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import checksum
from shardwise.checkpoint.disk import explained, sync_folder, write_file
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.folder import Partial, publish, resolve
from shardwise.checkpoint.manifest import NAME, FileRecord, Manifest, record_of
from shardwise.checkpoint.plan import BLOCK, FilePlan
from shardwise.checkpoint.recognise import LATEST
from shardwise.checkpoint.run_folder import read_manifest
from shardwise.checkpoint.writer import Part, check_hosts, write_header
from shardwise.config.version import __version__
from shardwise.errors import CheckpointError

LAST_MOMENT = datetime.max.replace(tzinfo=UTC)


def publish_files(
    partial: Partial,
    files: Sequence[FilePlan],
    parts: Sequence[Part],
    small: Mapping[str, bytes],
    facts: Mapping[str, Any],
) -> None:
    """Write the missing headers and the small files, and give the folder its name.

    Args:
        files: the files with tensors, of which only the headers are missing.
        parts: what each rank wrote of them.
        facts: fields of the manifest: all but time, versions, files and size of blocks.
    """
    folder = partial.path
    with explained(f"publishing {partial.final.name}"):
        check_hosts(folder, [file.name for file in files], parts)
        records = {file.name: _finished(folder, file, parts) for file in files}
        hit("headers written", 0)
        block = files[0].block if files else BLOCK
        for name, data in small.items():
            write_file(folder / name, data)
            records[name] = record_of(checksum.of_bytes(data, block), len(data))
        for place in sorted({(folder / name).parent for name in records} | {folder}, reverse=True):
            sync_folder(place)
        hit("small files written", 0)
        versions = {"shardwise": __version__, "torch": torch.__version__}
        stated = {
            "created": moment_of(partial.final),
            "versions": {**versions, "python": platform.python_version()},
            "block": block,
            "files": records,
        }
        unfinished = folder / f".{NAME}.unfinished"
        write_file(unfinished, Manifest(**{**facts, **stated}).encode())
        hit("manifest unfinished", 0)
        unfinished.rename(folder / NAME)
        sync_folder(folder)
        hit("manifest written", 0)
        publish(partial)


def _finished(folder: Path, file: FilePlan, parts: Iterable[Part]) -> FileRecord:
    pieces = write_header(folder, file)
    for part in parts:
        pieces += part.pieces.get(file.name, ())
    blocks = checksum.block_checksums(pieces, file.size, file.name, file.block)
    return record_of(blocks, file.size)


def moment_of(final: Path) -> str:
    """Now, or just after the run's last checkpoint, since the clocks of hosts differ."""
    now = datetime.now(UTC)
    with suppress(CheckpointError, OSError, ValueError):  # there may be none
        if before := read_manifest(resolve(final.with_name(LATEST))):
            last = datetime.fromisoformat(before.created)
            now = max(now, last + min(timedelta(microseconds=1), LAST_MOMENT - last))
    return now.isoformat(timespec="microseconds")
