"""A checkpoint's weights as one file that ``torch.load`` reads, as scripts of old expect it.

Written by way of an export, whose file is then mapped and not read: so a file of any size needs
no more memory than an export does.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.disk import explained, sync_folder
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.export import Exported, ExportOptions, Progress, export
from shardwise.checkpoint.folder import new_token
from shardwise.checkpoint.source import Place, Source
from shardwise.errors import CheckpointError

__all__ = ["export_pickled"]


def export_pickled(
    source: Source,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write parameters and buffers as a state dict that ``torch.load(weights_only=True)`` takes.

    Tied weights are there under each of their names, and share memory when loaded.

    Raises:
        CheckpointError: as ``export``; or optimizer state was asked for.
    """
    chosen = options or ExportOptions()
    final = Path(destination).expanduser().absolute()
    if chosen.with_optimizer:
        raise CheckpointError(
            "a single file holds weights alone. Leave --with-optimizer out, or choose another "
            "--format."
        )
    if final.is_dir() or (final.exists() and not chosen.overwrite):
        raise CheckpointError(
            f"{final} is there already, and is left as it is. Name another file, or pass "
            "--overwrite to replace a file."
        )
    beside = final.with_name(f".{final.name}.{new_token()}")
    try:
        made = export(source, beside, replace(chosen, max_file_size=1 << 62), progress)
        with explained(f"writing {final}"), Source.open(beside) as written:
            unfinished = beside / "unfinished"
            with unfinished.open("wb") as file:
                torch.save(_mapped(written), file)
                file.flush()
            _sync(unfinished)
            unfinished.replace(final)
            sync_folder(final.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Exported(final, made.tensors, final.stat().st_size, (final.name,), made.cast, ())


def _mapped(source: Source) -> dict[str, Tensor]:
    """Every tensor, in memory that the file backs."""
    found = {name: _tensor(source.folder, place) for name, place in source.tensors("model").items()}
    aliases = {} if source.manifest is None else source.manifest.aliases
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def _tensor(folder: Path, place: Place) -> Tensor:
    stored, dtype = place.stored, DTYPES[place.stored.dtype]
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
