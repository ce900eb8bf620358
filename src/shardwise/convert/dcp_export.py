"""A checkpoint of ours as a DCP folder, by torch's own writer, in a few megabytes of memory.

The writer plans from tensors without values (on the meta device) and asks for each when it is
about to write it; so what the folder looks like inside stays torch's business.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint import json_codec, training_state
from shardwise.checkpoint.disk import explained, sync_folder
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER
from shardwise.checkpoint.training_state import Document
from shardwise.checkpoint.wrappers import bare_record
from shardwise.convert.export import mapped, stored_tensors
from shardwise.convert.writer import Converted, Destination, workplace
from shardwise.errors import CheckpointError

AS_TORCH_BUILDS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options that our checkpoints leave to the script, and DCP asks for when it loads."""


def export_dcp(
    folder: str | Path, destination: str | Path, with_optimizer: bool | None = None
) -> Converted:
    """Write what ``torch.distributed.checkpoint.load`` reads, by the names of ``get_state_dict``.

    ``{"model": {NAME: …}, "optimizer": {"state": {NAME: …}, "param_groups": […]}, "step": …}``.
    Tied weights are there under each of their names.

    Args:
        folder: a checkpoint of ours, or a Hugging Face folder (weights alone).
        with_optimizer: optimizer state and step, too; ``None``: if there are any.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks optimizer state; the disk is full; or
            the destination exists. Nothing is left behind.
    """
    named = Destination(Path(destination).expanduser().absolute(), "dcp")
    final = named.path
    with CheckpointReader.open(folder) as source:
        named.check(None if source.manifest is None else source.folder)
        states, places = _states(source, with_optimizer)
        needed = sum(place.stored.stop - place.stored.start for place in places.values())
        with workplace(final, needed) as work, explained(f"writing {final}"):
            unfinished = work / "unfinished"
            _write(states, unfinished, _LatePlanner(lambda name: _read(source, places[name])))
            nbytes = sum(path.stat().st_size for path in unfinished.iterdir())
            sync_folder(unfinished)
            named.take(unfinished)
    return Converted(final, len(places), nbytes)


def _write(states: dict[str, Any], folder: Path, planner: _LatePlanner) -> None:
    writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
            save(states, storage_writer=writer, planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        causes = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((cause for cause, _ in causes), error)
        if isinstance(cause, (OSError, CheckpointError)):
            raise cause from error
        raise CheckpointError(
            f"writing {folder} failed: {cause!s:.300}. Check whether the disk is full, or export "
            "elsewhere."
        ) from error


class _LatePlanner(DefaultSavePlanner):
    """Gives the writer each tensor's values when it asks for them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor that this item stands for, read now."""
        data = super().resolve_data(write_item)
        is_late = isinstance(data, Tensor) and data.is_meta
        return self._read(write_item.index.fqn) if is_late else data


def _read(source: CheckpointReader, place: TensorLocation) -> Tensor:
    """Check a tensor and map it, since torch's writer keeps every tensor until its end."""
    source.check(place.file, place.stored.start, place.stored.stop)
    return mapped(source, place)


def _states(
    source: CheckpointReader, whole: bool | None
) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    """The state dict with tensors on the meta device, and where each is, by its flat name."""
    if whole is None:
        whole = source.manifest is not None and source.has(training_state.NAME)
    stored = stored_tensors(source, whole)
    weights = stored[MODEL] | {new: stored[MODEL][name] for new, name in source.aliases.items()}
    states: dict[str, Any] = {"model": {name: _meta(place) for name, place in weights.items()}}
    places = {f"model.{name}": place for name, place in weights.items()}
    if not whole:
        return states, places
    document = Document.decode(
        source.bytes(training_state.NAME), str(source.folder / training_state.NAME)
    )
    if document.step is not None:
        states["step"] = document.step
    if document.optimizers:
        by_param: dict[str, dict[str, Any]] = {}
        for full, place in stored.get(OPTIMIZER, {}).items():
            key, _, name = full.partition("/")
            by_param.setdefault(name, {})[key] = _meta(place)
            places[f"optimizer.state.{name}.{key}"] = place
        states["optimizer"] = {"state": by_param, "param_groups": _groups(document, by_param)}
    return states, places


def _groups(document: Document, state: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all optimizers; ``state`` gets the values that are no tensors."""
    records = [*map(bare_record, document.optimizers)]
    for record in records:
        for name, values in record["values"].items():
            state.setdefault(name, {}).update(json_codec.decode(values))
    groups = (group for record in records for group in record["groups"])
    return [  # an optimizer over named parameters asks for their names, too
        {**AS_TORCH_BUILDS, **json_codec.decode(group["options"]), "params": n, "param_names": n}
        for group in groups
        for n in [[*group["params"]]]
    ]


def _meta(place: TensorLocation) -> Tensor:
    return torch.empty(place.stored.shape, dtype=dtype_of(place.stored.dtype), device="meta")
