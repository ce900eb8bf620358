"""A checkpoint's weights as one file that ``torch.load`` reads, as scripts of old expect it.

Written by way of an export, whose file is then mapped and not read: so a file of any size needs
no more memory than an export does.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.disk import explained, sync_folder
from shardwise.checkpoint.one_file import write_one_file
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.checkpoint.save_plan import MODEL
from shardwise.convert.destination import Destination, check_room, workplace
from shardwise.convert.export import FLOATS, ExportOptions, export, mapped, stored_tensors
from shardwise.convert.writer import Converted, Progress
from shardwise.errors import CheckpointError

__all__ = ["export_torch_file"]


def export_torch_file(
    source: CheckpointReader,
    destination: Path,
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
    named = Destination(destination.absolute(), "pt", overwrite=chosen.overwrite)
    if chosen.with_optimizer:
        raise CheckpointError(
            "a single file holds weights alone. Leave --with-optimizer out, or choose another "
            "--format."
        )
    named.check()
    places = stored_tensors(source, False)[MODEL].values()
    check_room(named.path, 2 * sum(_nbytes(place, chosen.dtype) for place in places))
    with workplace(named.path) as folder:
        options = replace(chosen, max_file_size=1 << 62, overwrite=False)
        made = export(source, folder / "weights", options, progress)
        with CheckpointReader.open(folder / "weights") as written:
            states = {
                name: mapped(written, place) for name, place in written.tensors(MODEL).items()
            }
            aliases = {} if written.manifest is None else written.manifest.aliases
            states |= {alias: states[name] for alias, name in aliases.items() if name in states}
            saved = write_one_file(folder / "unfinished.pt", states)
        named.check()  # it may have come while this was written
        with explained(f"writing {named.path}"):
            saved.path.replace(named.path)
            sync_folder(named.path.parent)
    return Converted(named.path, made.tensors, saved.nbytes, (named.path.name,), made.cast)


def _nbytes(place: TensorLocation, dtype: torch.dtype | None) -> int:
    is_cast = dtype is not None and place.stored.dtype in FLOATS
    new = dtype if dtype is not None and is_cast else dtype_of(place.stored.dtype)
    return prod(place.stored.shape) * new.itemsize
