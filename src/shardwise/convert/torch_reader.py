"""A checkpoint that torch wrote: a folder of ``torch.distributed.checkpoint``, or a pickled file.

A pickle can run any code, so without trust only restricted readers open one:
``torch.load(weights_only=True)`` for files and for the values in a DCP folder, and for its
``.metadata`` an unpickler that knows only the classes of DCP's own description.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.safetensors_format import bytes_of, code_of, inside
from shardwise.errors import CheckpointError

Tree = dict[str | int, Any]
"""Dicts in dicts. A list of dicts or tensors is a dict, too, by its numbers."""

METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
"""What ``.metadata`` consists of, beside dtypes. Making one of these runs no other code."""

OF_DEEPSPEED = (
    "is a file of DeepSpeed, whose optimizer state and float32 weights are in parts without names. "
    "Run `python zero_to_fp32.py . weights --max_shard_size 9TB` where that script lies, and name "
    "the file it writes, which has weights alone. Without ZeRO, save torch.load(FILE)['module']."
)


@dataclass(frozen=True)
class TorchTensor:
    """A tensor that is read when it is needed."""

    source: Path  # the file or folder that holds it
    name: str  # its keys, joined by dots
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Its bytes in row-major order, ``[nbytes]``, uint8."""
        with _explained(self.source, f"{self.name!r:.200} could not be read"):
            return bytes_of(self.load())


class _Untrusted(Exception):
    """A restricted reader met a class that it does not know, which the text names."""


def read_torch(source: Path, trust: bool = False) -> Tree:
    """Everything in a DCP folder or a file of ``torch.save``; each tensor is a ``TorchTensor``.

    With ``trust`` what the restricted readers refuse is unpickled here, which can run any code.
    """
    with explained(f"opening {source}", reads=True):
        source.stat()
        if source.is_dir() and not (source / ".metadata").is_file():
            raise CheckpointError(
                f"{source} has no .metadata, so it is no complete DCP folder. Name the folder that "
                "torch.distributed.checkpoint.save wrote, or one pickled file."
            )
    with _explained(source, "it cannot be read"):
        tree = _folder(source, trust) if source.is_dir() else _file(source, trust)
    if not isinstance(tree, dict) or not tree:
        raise CheckpointError(
            f"{source} holds one value, or nothing, and no names. Save a dict of tensors by name, "
            "as state_dict() makes it."
        )
    inner = tree.get("optimizer")  # without ZeRO: torch's own, or one that keeps float32 apart
    keys = {*tree, *(inner if isinstance(inner, dict) else ())}
    if "ds_version" in keys and (tree.get("param_shapes") or "optimizer_state_dict" in keys):
        raise CheckpointError(f"{source} {OF_DEEPSPEED}")
    return tree


@contextmanager
def _explained(source: Path, what: str) -> Iterator[None]:
    """Turn what torch and pickle raise inside into a ``CheckpointError`` that says ``what``."""
    try:
        yield
    except CheckpointError:
        raise
    except _Untrusted as error:
        if str(error).startswith("deepspeed."):
            raise CheckpointError(f"{source} {OF_DEEPSPEED}") from None
        raise CheckpointError(
            f"{source} was not read: {error} in it would have to be unpickled, which can run any "
            "code. If you trust whoever wrote it, pass trust=True (on the command line: "
            "--trust-source)."
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{source}: {what}: {type(error).__name__}: {error!s:.300}. Check whether it is "
            "complete, and written by torch."
        ) from error


def _load(file: Path | BinaryIO, trust: bool, name: str, mmap: bool = False) -> Any:
    """Read by torch's restricted reader; with trust, unpickle what that refuses."""
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        if not trust or (match and match[1].startswith("deepspeed.")):
            raise _Untrusted(match[1] if match else repr(name)) from None
    if not isinstance(file, Path):
        file.seek(0)
    return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)


# --- a file that torch.save wrote ------------------------------------------------------------


def _file(source: Path, trust: bool) -> Any:
    """The values of a file; tensors are mapped, and read from the disk when they are used."""
    try:
        states = _load(source, trust, source.name, mmap=True)
    except RuntimeError:  # written by a torch before 1.6, in one stream: it cannot be mapped
        states = _load(source, trust, source.name)
    return _tree(source, states, "")


def _tree(source: Path, value: Any, name: str) -> Any:
    if isinstance(value, list) and any(isinstance(v, Mapping | Tensor) for v in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        items = [(key if isinstance(key, int) else str(key), value[key]) for key in value]
        return {key: _tree(source, inner, f"{name}.{key}".lstrip(".")) for key, inner in items}
    return _in_memory(source, value, name) if isinstance(value, Tensor) else value


def _in_memory(source: Path, value: Tensor, name: str) -> TorchTensor:
    is_dense = value.layout == torch.strided and not value.is_meta and not value.is_quantized
    if not is_dense or type(value) not in (Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{source}: {name!r:.200} is no dense tensor ({type(value).__name__}, {value.layout}, "
            f"{value.device}). Save whole tensors, as a full state dict has them."
        )
    return TorchTensor(source, name, code_of(value.dtype, name), (*value.shape,), lambda: value)


# --- a folder that torch.distributed.checkpoint wrote ----------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of ``.metadata`` and dtypes; with trust, everything."""

    def __init__(self, file: BinaryIO, trust: bool) -> None:
        super().__init__(file)
        self._trust = trust

    def find_class(self, module: str, name: str) -> Any:
        """The class of this name. Raises ``_Untrusted`` for one that ``.metadata`` has not."""
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        is_dtype = module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype)
        if self._trust or is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise _Untrusted(f"{module}.{name}")


def _folder(source: Path, trust: bool) -> Tree:
    """All that ``.metadata`` lists; tensors are joined from their chunks when they are used."""
    with (source / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file, trust).load()
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    chunks: dict[str, dict[Any, Any]] = {}  # name → offsets in the tensor, or None → place on disk
    for index, place in metadata.storage_data.items():
        offsets = None if index.offset is None else tuple(index.offset)
        chunks.setdefault(index.fqn, {})[offsets] = place
    tree: Tree = {}
    for name, kind in metadata.state_dict_metadata.items():
        places = chunks.get(name, {})
        if type(kind).__name__ == "TensorStorageMetadata":
            dtype, load = kind.properties.dtype, partial(_joined, source, kind, places)
            value: Any = TorchTensor(source, name, code_of(dtype, name), tuple(kind.size), load)
        else:
            value = _chunk(source, next(iter(places.values())), trust, name)
        *parents, key = paths.get(name, (name,))
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = value
    return tree


def _joined(source: Path, kind: Any, places: Mapping[Any, Any]) -> Tensor:
    """A tensor from all its chunks."""
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
    whole = torch.empty(tuple(kind.size), dtype=kind.properties.dtype)
    absent = torch.ones(whole.shape, dtype=torch.bool)
    for offsets, lengths in sizes.items():
        ranges = tuple(slice(start, start + n) for start, n in zip(offsets, lengths, strict=True))
        if prod(lengths):
            part = _chunk(source, places[offsets], False, "a tensor")
            if (part.dtype, *part.shape) != (whole.dtype, *lengths):  # which torch would spread
                raise ValueError(f"a chunk of {(*part.shape,)} {part.dtype} is not as described")
            whole[ranges], absent[ranges] = part, False
    if bool(absent.any()):
        raise ValueError(f"its chunks do not make up its shape {tuple(kind.size)}")
    return whole


def _chunk(source: Path, place: Any, trust: bool, name: str) -> Any:
    if getattr(place, "transform_descriptors", None):
        raise ValueError("it was written through an extension of DCP (compressed or encrypted)")
    with inside(source, str(place.relative_path)).open("rb") as file:
        file.seek(place.offset)
        return _load(io.BytesIO(file.read(place.length)), trust, name)
