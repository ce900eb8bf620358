"""A checkpoint of ours as a DCP folder, by torch's own writer, in a few megabytes of memory.

The writer plans from tensors without values (on the meta device) and asks for each when it is
about to write it; so what the folder looks like inside stays torch's business.
"""

from __future__ import annotations

import copy
import io
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint import plain, state
from shardwise.checkpoint.contents import MODEL, OPTIMIZER
from shardwise.checkpoint.dcp.imported import Converted
from shardwise.checkpoint.dcp.sorted_out import default_options
from shardwise.checkpoint.disk import explained, sync_folder
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.folder import new_token
from shardwise.checkpoint.source import Place, Source
from shardwise.checkpoint.state import Document
from shardwise.errors import CheckpointError

__all__ = ["export_dcp"]


def export_dcp(folder: str | Path, destination: str | Path) -> Converted:
    """Write what ``torch.distributed.checkpoint.load`` reads.

    ``{"model": {NAME: …}, "optimizer": {"state": {NAME: …}, "param_groups": […]}, "step": …}``, as
    ``get_state_dict`` names things; tied weights under each of their names.

    Args:
        folder: a checkpoint of ours, or a Hugging Face folder (weights alone).
        destination: a folder that does not exist yet.

    Raises:
        CheckpointError: the checkpoint is damaged, or the destination is there. Nothing is left
            behind.
    """
    final = Path(destination).expanduser().absolute()
    if final.exists():
        raise CheckpointError(f"{final} is there already, and is left as it is. Name another.")
    unfinished = final.with_name(f".{final.name}.unfinished-{new_token()}")
    try:
        with Source.open(folder) as source, explained(f"writing {final}"):
            states, places = _decided(source)
            final.parent.mkdir(parents=True, exist_ok=True)
            writer = FileSystemWriter(unfinished, thread_count=1, sync_files=True)
            planner = _Late(lambda name: _read(source, places[name]))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
                save(states, storage_writer=writer, planner=planner, no_dist=True)
            nbytes = sum(path.stat().st_size for path in unfinished.iterdir())
            sync_folder(unfinished)
            unfinished.rename(final)
            sync_folder(final.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Converted(final, len(places), nbytes)


class _Late(DefaultSavePlanner):
    """Gives the writer each tensor's values when it asks for them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor that this item stands for, read now."""
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor) and found.is_meta:
            return self._read(write_item.index.fqn)
        return found


def _decided(source: Source) -> tuple[dict[str, Any], dict[str, Place]]:
    """The state dict with tensors on the meta device, and where each is, by its flat name."""
    weights = source.tensors(MODEL)
    if not weights:
        raise CheckpointError(f"{source.folder} holds no model.safetensors to export.")
    if source.manifest is not None:
        aliases = source.manifest.aliases.items()
        weights |= {alias: weights[name] for alias, name in aliases if name in weights}
    states: dict[str, Any] = {"model": {name: _meta(place) for name, place in weights.items()}}
    places = {f"model.{name}": place for name, place in weights.items()}
    if source.manifest is None or not source.has(state.NAME):
        return states, places
    document = Document.decode(source.bytes(state.NAME), str(source.folder / state.NAME))
    if document.step is not None:
        states["step"] = document.step
    if document.optimizers:
        tensors = source.tensors(OPTIMIZER)
        states["optimizer"] = _optimizer(document, tensors)
        for full, place in tensors.items():
            key, _, name = full.partition("/")
            places[f"optimizer.state.{name}.{key}"] = place
    return states, places


def _optimizer(document: Document, tensors: Mapping[str, Place]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for full, place in tensors.items():
        key, _, name = full.partition("/")
        found.setdefault(name, {})[key] = _meta(place)
    groups = []
    for record in document.optimizers:
        for name, values in record["values"].items():
            found.setdefault(name, {}).update({k: plain.decode(v) for k, v in values.items()})
        for group in record["groups"]:
            options = {key: plain.decode(value) for key, value in group["options"].items()}
            # What our checkpoints leave to the script (fused …), DCP asks for when it loads.
            everything = {**default_options(record["class"]), **options}
            groups.append({**copy.deepcopy(everything), "params": list(group["params"])})
    return {"state": found, "param_groups": groups}


def _meta(place: Place) -> Tensor:
    return torch.empty(place.stored.shape, dtype=DTYPES[place.stored.dtype], device="meta")


def _read(source: Source, place: Place) -> Tensor:
    """Checked, and then mapped: torch's writer keeps all it wrote, and must not keep memory."""
    stored, dtype = place.stored, DTYPES[place.stored.dtype]
    if stored.start == stored.stop:
        return torch.empty(stored.shape, dtype=dtype)
    for _ in source.read(place.file, stored.start, stored.stop):
        pass  # raises where bytes are not those that were written
    length = (stored.stop - stored.start,)
    # Copy on write, and nobody writes: a tensor over read-only memory is a warning.
    data = np.memmap(source.folder / place.file, np.uint8, "c", stored.start, length)
    return torch.from_numpy(data).view(dtype).reshape(stored.shape)
