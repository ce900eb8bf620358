"""A checkpoint's weights as one file that ``torch.load`` reads, as scripts of old expect it.

Written by way of an export, whose file is then mapped and not read: so a file of any size needs
no more memory than an export does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.disk import explained, sync_folder, written_by_library
from shardwise.checkpoint.dtypes import dtype_of, itemsize
from shardwise.checkpoint.source import Place, Source
from shardwise.convert.destination import Destination, check_room, workplace
from shardwise.convert.export import (
    FLOATS,
    ExportOptions,
    check_whole,
    export,
)
from shardwise.convert.writer import Converted, Progress
from shardwise.errors import CheckpointError

__all__ = ["export_pickled"]


def export_pickled(
    source: Source,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write parameters and buffers as a state dict that ``torch.load(weights_only=True)`` takes.

    Tied weights are there under each of their names, and share memory when loaded, where a
    manifest tells the names; a Hugging Face folder has none, and stores one of them alone. While
    it is written, the disk holds the weights twice.

    Raises:
        CheckpointError: as ``export``; or optimizer state was asked for.
    """
    chosen = options or ExportOptions()
    named = Destination.of(destination, False, chosen.overwrite)
    final = named.path
    if chosen.with_optimizer:
        raise CheckpointError(
            "a single file holds weights alone. Leave --with-optimizer out, or choose another "
            "--format."
        )
    named.check_file()
    check_whole(source)
    check_room(final, 2 * _nbytes(source, chosen.dtype))
    with workplace(final) as folder:
        between, unfinished = folder / "weights", folder / "unfinished"
        whole = replace(chosen, max_file_size=1 << 62, overwrite=False)
        made = export(source, between, whole, progress)
        with explained(f"writing {final}"), Source.open(between) as written:
            _save(_mapped(written), unfinished)
            _sync(unfinished)
            nbytes = unfinished.stat().st_size
            named.check_file()  # it may have come while this was written
            unfinished.replace(final)
            sync_folder(final.parent)
    return Converted(final, made.tensors, nbytes, (final.name,), made.cast, ())


def _nbytes(source: Source, dtype: torch.dtype | None) -> int:
    total = 0
    for place in source.tensors(MODEL).values():
        cast = dtype is not None and place.stored.dtype in FLOATS
        size = dtype.itemsize if cast and dtype is not None else itemsize(place.stored.dtype)
        total += prod(place.stored.shape) * size
    return total


def _save(states: dict[str, Tensor], unfinished: Path) -> None:
    with written_by_library(unfinished, "export"):
        torch.save(states, unfinished)


def _mapped(source: Source) -> dict[str, Tensor]:
    """Every tensor, in memory that the file backs."""
    found = {name: _tensor(source.folder, place) for name, place in source.tensors("model").items()}
    aliases = {} if source.manifest is None else source.manifest.aliases
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def _tensor(folder: Path, place: Place) -> Tensor:
    stored, dtype = place.stored, dtype_of(place.stored.dtype)
    if stored.start == stored.stop:
        return torch.empty(stored.shape, dtype=dtype)
    size = stored.stop - stored.start
    # Copy on write, and nobody writes: a tensor over read-only memory is a warning.
    data = np.memmap(folder / place.file, np.uint8, "c", stored.start, (size,))
    return torch.from_numpy(data).view(dtype).reshape(stored.shape)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
