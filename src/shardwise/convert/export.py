"""A checkpoint as another folder: merged or split, cast, checked on the way, in a few megabytes.

1. decide     which tensors, in which dtypes, in which files: on paper, as for saving
2. write      block by block: read and checked, cast, written with a new checksum
3. publish    headers → small files → manifest → rename
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.disk import explained, size_of, sync_folder
from shardwise.checkpoint.folder import CHECKPOINTS, step_of
from shardwise.checkpoint.lock import LOCK
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.one_file import write_one_file
from shardwise.checkpoint.plan import BLOCK, INDEX, FilePlan, cut_at_blocks, plan_files
from shardwise.checkpoint.read_requests import ReadRequest, read_into
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import DTYPES, code_of, dtype_of, inside
from shardwise.checkpoint.save_plan import MODEL
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.checkpoint.writer import Chunk
from shardwise.convert.catalogue import OF_TORCH, SUFFIX, check_foreign, stem_of
from shardwise.convert.writer import (
    Converted,
    Destination,
    Progress,
    check_room_beside,
    entry_of,
    workplace,
    write_folder,
)
from shardwise.errors import CheckpointError
from shardwise.precision import dtype_name

FLOATS = ("F64", "F32", "F16", "BF16")
"""What is cast. Eight-bit floats stay: without their scales they mean nothing."""


@dataclass(frozen=True)
class ExportOptions:
    """What the result is to be.

    Attributes:
        dtype: of floating-point weights; ``None``: as they are.
        max_file_size: bytes of tensors in a file at most, unless one tensor has more.
        with_optimizer: all that a run needs to go on, too, and not weights alone.
        overwrite: a checkpoint or an earlier export of that name may be replaced.
    """

    dtype: torch.dtype | None = None
    max_file_size: int = 5_000_000_000
    with_optimizer: bool = False
    overwrite: bool = False


def export(
    source: CheckpointReader,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write ``source`` again, as a folder that ``transformers`` and shardwise load.

    Beyond Python and torch it holds a few blocks of 4 MiB, whatever the size of the model.

    Args:
        source: open; closed by the caller.
        destination: a folder that does not exist yet.
        progress: called with the bytes that were written since the last call, and all of them.
    """
    chosen = options or ExportOptions()
    whole = chosen.with_optimizer
    named = Destination(Path(destination).absolute(), "hf", whole, chosen.overwrite)
    named.check(None if source.manifest is None else source.folder)
    places = stored_tensors(source, whole)
    plans = _plans(places, chosen)
    small, left_out = companions(source, whole)
    if chosen.dtype is not None and CONFIG in small:
        small[CONFIG] = with_dtype(small[CONFIG], chosen.dtype)
    facts = {"step": None, "aliases": {}, **dict(source.manifest or {})}
    if not whole or source.manifest is None:
        facts |= {"world": 1, "strategy": "export", "kind": "full"}
    made = write_folder(
        named.path,
        plans,
        lambda stem, plan: _chunks(source, places[stem], plan),
        small,
        facts,
        progress,
    )
    dtypes = {name: stored.dtype for plan in plans[MODEL] for name, stored in plan.tensors.items()}
    cast = [name for name in dtypes if dtypes[name] != places[MODEL][name].stored.dtype]
    return replace(made, cast=tuple(cast), left_out=left_out)


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
    """
    chosen = options or ExportOptions()
    named = Destination(destination.absolute(), "pt", overwrite=chosen.overwrite)
    if chosen.with_optimizer:
        raise CheckpointError(
            "a single file holds weights alone. Leave --with-optimizer out, or choose another "
            "--format."
        )
    named.check()
    plans = _plans(stored_tensors(source, False), chosen)
    check_room_beside(named.path, 2 * sum(plan.size for plan in plans[MODEL]))
    with workplace(named.path) as folder:
        options = replace(chosen, max_file_size=1 << 62, overwrite=False)
        made = export(source, folder / "weights", options, progress)
        with CheckpointReader.open(folder / "weights") as written:
            states = {
                name: mapped(written, place) for name, place in written.tensors(MODEL).items()
            }
            states |= {alias: states[name] for alias, name in written.aliases.items()}
            _, nbytes = write_one_file(folder / "unfinished.pt", states)
        named.check()  # it may have come while this was written
        with explained(f"writing {named.path}"):
            (folder / "unfinished.pt").replace(named.path)
            sync_folder(named.path.parent)
    return Converted(named.path, made.tensors, nbytes, (named.path.name,), made.cast)


def stored_tensors(source: CheckpointReader, whole: bool) -> dict[str, dict[str, TensorLocation]]:
    """Where each tensor is, by kind and name: weights, and with ``whole`` all other state."""
    folder, kinds = source.folder, [MODEL]
    if source.manifest is None and not source.only:
        check_foreign(folder)
    if whole:
        if source.manifest is None or not source.has(TRAINING):
            raise CheckpointError(
                f"{folder} holds no optimizer and training state; it has weights alone. Export it "
                "without --with-optimizer."
            )
        kinds += filter(None, map(stem_of, source.manifest.files))
    places = {kind: source.tensors(kind) for kind in dict.fromkeys(kinds)}
    if not places[MODEL]:
        of_torch = [folder / name for name in source.listed() if name.endswith(OF_TORCH)]
        advice = "Name a checkpoint, or a folder of safetensors files."
        raise CheckpointError(
            f"{folder} holds no model.safetensors and no index of several, so there are no weights "
            f"to export. {f'Name that file: {of_torch[0]}.' if of_torch else advice}"
        )
    return places


def mapped(source: CheckpointReader, place: TensorLocation) -> Tensor:
    """A tensor in memory that its file backs; its bytes are not checked."""
    stored, dtype = place.stored, dtype_of(place.stored.dtype)
    if stored.start == stored.stop:
        return torch.empty(stored.shape, dtype=dtype)
    path, length = source.folder / place.file, (stored.stop - stored.start,)
    # Copy on write, and nobody writes: a tensor over read-only memory is a warning.
    data = np.memmap(path, np.uint8, "c", stored.start, length)
    return torch.from_numpy(data).view(dtype).reshape(stored.shape)


def _plans(
    places: Mapping[str, Mapping[str, TensorLocation]], options: ExportOptions
) -> dict[str, tuple[FilePlan, ...]]:
    """The new files of each kind; weights are cast, and no other state."""
    target = None if options.dtype is None else code_of(options.dtype, "--dtype")
    if target not in (None, *FLOATS):
        known = ", ".join(dtype_name(DTYPES[code]) for code in FLOATS)
        raise CheckpointError(f"weights cannot be cast to {options.dtype}; choose one of {known}.")
    plans = {}
    for kind, by_name in places.items():
        entries = []
        for name, (_, stored) in by_name.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"tensor {name!r} is stored as {stored.dtype}, and torch has no such dtype, so "
                    "it cannot be exported. Convert it with the tool that wrote it."
                )
            is_cast = target is not None and kind == MODEL and stored.dtype in FLOATS
            dtype = target if target is not None and is_cast else stored.dtype
            entries.append(entry_of(name, dtype, stored.shape))
        plans[kind] = plan_files(kind, entries, options.max_file_size)
    return plans


def _chunks(
    source: CheckpointReader, places: Mapping[str, TensorLocation], plan: FilePlan
) -> Iterator[Chunk]:
    """The bytes of a new file, block by block, in the same memory each time."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    for name, stored in plan.tensors.items():
        dtype = DTYPES[stored.dtype]
        for start, stop in cut_at_blocks(stored.start, stored.stop):
            out = buffer[: stop - start].view(dtype)
            request = ReadRequest(places[name], (start - stored.start) // dtype.itemsize, out)
            read_into(source, [request])
            if out.dtype != request.dtype and bool(out.isinf().any()):
                _check_range(source, name, request)
            yield Chunk(plan.name, start, stop, (buffer[: stop - start],))


def _check_range(source: CheckpointReader, name: str, request: ReadRequest) -> None:
    """Raises ``CheckpointError`` where a cast made a finite value infinite."""
    before = torch.empty(request.out.numel(), dtype=request.dtype)
    read_into(source, [ReadRequest(request.place, request.start, before)])
    lost: Tensor = request.out.isinf() & ~before.isinf()
    if count := int(lost.sum()):
        limit, largest = torch.finfo(request.out.dtype).max, float(before[lost].abs().max())
        raise CheckpointError(
            f"{count:,} values of {name} do not fit {request.out.dtype}: the largest there is "
            f"{largest:.6g}, and {limit:.6g} is the most, so they would become infinite. "
            "Nothing was written. Export as bfloat16, or without --dtype."
        )


# --- what lies beside the weights ---------------------------------------------------------------

CONFIG = "config.json"
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of what a folder of weights has beside them: configuration and tokenizer."""
FROM_A_RUN = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "tokenizer.model"),
    "chat_template.jinja",
)
LARGEST = 100_000_000  # bytes of a small file, which is in memory as a whole


def companions(source: CheckpointReader, whole: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Bytes of configuration and tokenizer by name, and the names of what is left out.

    Args:
        whole: training state, too.
    """
    names = [n for n in source.listed() if not n.endswith((SUFFIX, INDEX)) and source.has(n)]
    of_ours = {MANIFEST, LOCK} if whole else {MANIFEST, LOCK, TRAINING}
    wanted = [n for n in names if _is_small(source.folder, n) or n == TRAINING]
    small = {name: source.bytes(name) for name in wanted if name not in of_ours}
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            if name not in small and _is_small(folder, name):
                with explained(f"reading {folder / name}", reads=True):
                    small[name] = (folder / name).read_bytes()
    return small, tuple(sorted({*names} - {*wanted} - of_ours))


def _is_small(folder: Path, name: str) -> bool:
    """Is there such a file that is configuration or a tokenizer?"""
    if not name.endswith(SMALL) or name.endswith(".index.json"):
        return False
    path = inside(folder, name)
    with explained(f"reading {path}", reads=True):
        nbytes = size_of(path)
    return nbytes is not None and nbytes <= LARGEST


def _run_folders(source: CheckpointReader) -> list[Path]:
    """Where a run keeps what all its checkpoints share; where one file's folder keeps the rest."""
    if not source.listed() and source.names(MODEL) == [f"{MODEL}{SUFFIX}"]:
        return [source.folder]  # one file alone, by the name that only such a folder's file has
    if source.manifest is None or step_of(source.folder.name) is None:
        return []
    parent = source.folder.parent
    return [parent, parent.parent] if parent.name == CHECKPOINTS else [parent]


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """``config.json`` that says the new dtype, since ``transformers`` loads as it says."""

    def changed(key: str, value: Any) -> Any:
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            return dtype_name(dtype)
        is_config = key.endswith("_config") and key != "quantization_config"
        if not is_config or not isinstance(value, dict):
            return value
        return {inner: changed(inner, one) for inner, one in value.items()}

    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        raise CheckpointError(
            "config.json is not JSON, so it cannot be told the new dtype. Mend it, or export "
            "without --dtype."
        ) from None
    return json.dumps(changed("_config", fields), indent=2, ensure_ascii=False).encode() + b"\n"
