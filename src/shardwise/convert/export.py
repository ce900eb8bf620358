"""A checkpoint as another folder: merged or split, cast, checked on the way, in a few megabytes.

1. decide     which tensors, in which dtypes, in which files: on paper, as for saving
2. write      block by block: read and checked, cast, written with a new checksum
3. publish    headers → small files → manifest → rename
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.disk import explained, size_of
from shardwise.checkpoint.lock import LOCK
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.one_file import write_one_file
from shardwise.checkpoint.plan import BLOCK, INDEX, FilePlan, plan_files
from shardwise.checkpoint.read_requests import ReadRequest, read_into
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.recognise import CHECKPOINTS, EXPORT, step_of
from shardwise.checkpoint.safetensors_format import DTYPES, code_of, dtype_of, inside
from shardwise.checkpoint.save_plan import MODEL
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.checkpoint.training_state import without_wrappers
from shardwise.checkpoint.wrappers import of_plain_model
from shardwise.checkpoint.writer import Chunk
from shardwise.convert.catalogue import SUFFIX, check_foreign, stem_of
from shardwise.convert.writer import (
    Converted,
    Destination,
    Progress,
    entry_of,
    no_progress,
    workplace,
    write_folder,
)
from shardwise.errors import CheckpointError
from shardwise.plan.layout.layout import cut_at_multiples

FLOATS = ("F64", "F32", "F16", "BF16")
"""What is cast. Eight-bit floats stay: without their scales they mean nothing."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    dtype: torch.dtype | None = None  # of floating-point weights; None: as stored
    max_file_size: int = 5_000_000_000  # bytes of tensors in a file, unless one tensor has more
    with_optimizer: bool = False  # with optimizer and training state
    overwrite: bool = False  # a checkpoint or an earlier export of that name may be replaced


AS_STORED = ExportOptions()
Changed = Mapping[str, Callable[[], Tensor]]


def export(
    source: CheckpointReader,
    destination: str | Path,
    options: ExportOptions = AS_STORED,
    progress: Progress = no_progress,
    changed: Changed | None = None,
    tokenizer: Mapping[str, bytes] = {},
) -> Converted:
    """Write ``source`` again, as a folder that ``transformers`` and shardwise load.

    Beyond Python and torch it holds a few blocks of 4 MiB, whatever the size of the model, and one
    of the tensors that are ``changed``: by name, what makes it in its stored shape. The files of
    ``tokenizer``, by name, take the place of the source's.
    """
    whole = options.with_optimizer
    named = Destination(Path(destination).absolute(), "hf", whole, options.overwrite)
    named.check(None if source.manifest is None else source.folder)
    places = stored_tensors(source, whole)
    plans = _plans(places, options)
    small, left_out = companions(source, whole)
    small = {n: small[n] for n in small if not (tokenizer and n in TOKENIZER)} | dict(tokenizer)
    if TRAINING in small:
        small[TRAINING] = without_wrappers(small[TRAINING])
    if options.dtype is not None and CONFIG in small:
        small[CONFIG] = with_dtype(small[CONFIG], options.dtype)
    facts = {"step": None, **dict(source.manifest or {}), "aliases": source.aliases}
    if not whole or source.manifest is None:
        facts |= {"world": 1, "strategy": EXPORT, "kind": "full"}

    def chunks_of(stem: str, plan: FilePlan) -> Iterator[Chunk]:
        return _chunks(source, places[stem], plan, (changed or {}) if stem == MODEL else {})

    converted = write_folder(named.path, plans, chunks_of, small, facts, progress)
    dtypes = {name: stored.dtype for plan in plans[MODEL] for name, stored in plan.tensors.items()}
    cast = [name for name in dtypes if dtypes[name] != places[MODEL][name].stored.dtype]
    return replace(converted, cast=tuple(cast), left_out=left_out)


def export_torch_file(
    source: CheckpointReader,
    destination: Path,
    options: ExportOptions = AS_STORED,
    progress: Progress = no_progress,
) -> Converted:
    """Write parameters and buffers as a state dict that ``torch.load(weights_only=True)`` takes.

    Tied weights are stored under each of their names if a manifest tells these, and share memory
    when loaded. While the file is written, the disk holds the weights twice.
    """
    named = Destination(destination.absolute(), "pt", overwrite=options.overwrite)
    if options.with_optimizer:
        raise CheckpointError("a single file holds weights alone. Leave --with-optimizer out.")
    named.check()
    plans = _plans(stored_tensors(source, False), options)
    with workplace(named.path, 2 * sum(plan.size for plan in plans[MODEL])) as folder:
        in_one_file = replace(options, max_file_size=1 << 62, overwrite=False)
        converted = export(source, folder / "weights", in_one_file, progress)
        with CheckpointReader.open(folder / "weights") as written:
            places = written.tensors(MODEL)
            states = {name: mapped(written, place) for name, place in places.items()}
            states |= {alias: states[name] for alias, name in written.aliases.items()}
            _, nbytes = write_one_file(folder / "unfinished.pt", states)
        named.take(folder / "unfinished.pt")
    return Converted(named.path, converted.tensors, nbytes, (named.path.name,), converted.cast)


def stored_tensors(source: CheckpointReader, whole: bool) -> dict[str, dict[str, TensorLocation]]:
    """Locate each tensor, by kind and name: weights, and with ``whole`` all other state."""
    if source.manifest is None and not source.only:
        check_foreign(source.folder)
    weights = source.weights()
    places = {MODEL: weights if source.manifest is not None else of_plain_model(weights)}
    if whole:
        if source.manifest is None or not source.has(TRAINING):
            raise CheckpointError(
                f"{source.folder} holds no optimizer and training state; it has weights alone. "
                "Export it without --with-optimizer."
            )
        kinds = {stem_of(name) for name in source.manifest.files} - {"", MODEL}
        places |= {kind: source.tensors(kind) for kind in sorted(kinds)}
    return places


def mapped(source: CheckpointReader, place: TensorLocation) -> Tensor:
    """A tensor in memory that its file backs; its bytes are not checked."""
    stored, dtype = place.stored, dtype_of(place.stored.dtype)
    if stored.start == stored.stop:
        return torch.empty(stored.shape, dtype=dtype)
    path, length = source.folder / place.file, (stored.stop - stored.start,)
    # Mode "c" is copy on write: torch warns of memory that is read-only.
    data = np.memmap(path, np.uint8, "c", stored.start, length)
    return torch.from_numpy(data).view(dtype).reshape(stored.shape)


def _plans(
    places: Mapping[str, Mapping[str, TensorLocation]], options: ExportOptions
) -> dict[str, tuple[FilePlan, ...]]:
    """The new files of each kind; only weights are cast."""
    target = None if options.dtype is None else code_of(options.dtype, "--dtype")
    if target not in (None, *FLOATS):
        known = ", ".join(str(DTYPES[code]).removeprefix("torch.") for code in FLOATS)
        raise CheckpointError(f"weights cannot be cast to {options.dtype}; choose one of {known}.")
    plans = {}
    for kind, by_name in places.items():
        entries = []
        for name, (_, stored) in by_name.items():
            dtype_of(stored.dtype, f"tensor {name!r}")  # raises for what torch has no dtype for
            is_cast = kind == MODEL and stored.dtype in FLOATS
            dtype = target if target is not None and is_cast else stored.dtype
            entries.append(entry_of(name, dtype, stored.shape))
        plans[kind] = plan_files(kind, entries, options.max_file_size)
    return plans


def _chunks(
    source: CheckpointReader, places: Mapping[str, TensorLocation], plan: FilePlan, changed: Changed
) -> Iterator[Chunk]:
    """The bytes of a new file, block by block, in the same memory each time."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    for name, stored in plan.tensors.items():
        dtype, place = DTYPES[stored.dtype], places[name]
        values = changed[name]().reshape(-1) if name in changed else None
        for start, stop in cut_at_multiples(stored.start, stored.stop, BLOCK):
            out = buffer[: stop - start].view(dtype)
            request = ReadRequest(place, (start - stored.start) // dtype.itemsize, out)
            _values(source, request, values)
            if out.dtype != request.dtype and bool(out.isinf().any()):
                exact = request._replace(out=torch.empty_like(out, dtype=request.dtype))
                _check_range(name, out, _values(source, exact, values))
            yield Chunk(plan.name, start, stop, (buffer[: stop - start],))


def _values(source: CheckpointReader, request: ReadRequest, values: Tensor | None) -> Tensor:
    """Fill the request from its file, or from a whole tensor that was ``made``, flat."""
    if values is None:
        read_into(source, [request])
    else:
        request.out.copy_(values[request.start : request.start + request.out.numel()])
    return request.out


def _check_range(name: str, out: Tensor, before: Tensor) -> None:
    """Raises ``CheckpointError`` where a cast made a finite value infinite."""
    lost: Tensor = out.isinf() & ~before.isinf()
    if count := int(lost.sum()):
        limit, largest = torch.finfo(out.dtype).max, float(before[lost].abs().max())
        raise CheckpointError(
            f"{count:,} values of {name} do not fit {out.dtype}: the largest there is "
            f"{largest:.6g}, and {limit:.6g} is the most, so they would become infinite. "
            "Nothing was written. Export as bfloat16, or without --dtype."
        )


# --- what lies beside the weights ---------------------------------------------------------------

CONFIG = "config.json"
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of what a folder of weights has beside them: configuration and tokenizer."""
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
FROM_A_RUN = (CONFIG, "generation_config.json", *TOKENIZER)
LARGEST = 100_000_000  # bytes of a small file, which is in memory as a whole


def companions(source: CheckpointReader, whole: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Bytes of configuration and tokenizer by name, and the names of what is left out.

    With ``whole`` the former include training state.
    """
    names = [name for name in source.listed() if not name.endswith((SUFFIX, INDEX))]
    of_ours = {MANIFEST, LOCK} if whole else {MANIFEST, LOCK, TRAINING}
    copied = [n for n in names if _is_small(source.folder, n) or n == TRAINING]
    small = {name: source.bytes(name) for name in copied if name not in of_ours}
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            if name not in small and _is_small(folder, name):
                with explained(f"reading {folder / name}", reads=True):
                    small[name] = (folder / name).read_bytes()
    return small, tuple(sorted({*names} - {*copied} - of_ours))


def _is_small(folder: Path, name: str) -> bool:
    """Is it a file of configuration or a tokenizer, and not too large?"""
    if not name.endswith(SMALL) or name.endswith(".index.json"):
        return False
    path = inside(folder, name)
    with explained(f"reading {path}", reads=True):
        nbytes = size_of(path)
    return nbytes is not None and nbytes <= LARGEST


def _run_folders(source: CheckpointReader) -> list[Path]:
    """Folders that may hold the configuration and tokenizer of the weights."""
    if source.only == f"{MODEL}{SUFFIX}":  # whose folder surely is a folder of weights
        return [source.folder]
    parent = source.folder.parent
    if source.manifest is not None and parent.name == CHECKPOINTS:
        return [parent, parent.parent]
    return [parent] * (source.manifest is not None and step_of(source.folder.name) is not None)


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """``config.json`` with the new dtype, in which ``transformers`` loads the weights."""

    def changed(key: str, value: Any) -> Any:
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            return str(dtype).removeprefix("torch.")
        is_config = key.endswith("_config") and key != "quantization_config"
        if not is_config or not isinstance(value, dict):
            return value
        return {inner: changed(inner, one) for inner, one in value.items()}

    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        raise CheckpointError(
            "config.json is not JSON, so the new dtype cannot be written to it. Correct it, or "
            "export without --dtype."
        ) from None
    return json.dumps(changed("_config", fields), indent=2, ensure_ascii=False).encode() + b"\n"
