"""The safetensors format: dtypes, headers, and the names that files may have.

    8 bytes: length n | n bytes of JSON: {"name": {"dtype", "shape", "data_offsets"}, …} | data

A header comes from wherever the file does, so every number in it is checked against the file's
size before anything is read or allocated. Ours are padded with spaces, as the format allows, so
that data starts at a page. File names may come from somebody else's index: only plain names are
followed, and links only within the folder.

Microscaling formats (MX) have elements of 4 and 6 bits. torch packs two of 4 bits into one
element, so such a tensor is stored as ``[…, 2 n]`` and is ``[…, n]`` here. It has none of 6 bits:
those are known by name and size, so that the tensors beside them can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.disk import size_of
from shardwise.errors import CheckpointError, DamagedCheckpoint

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PACKED = {"F4": 2}
"""Stored elements in one of torch's."""
BITS = {code: 8 * dtype.itemsize // PACKED.get(code, 1) for code, dtype in DTYPES.items()}
BITS |= {"F6_E2M3": 6, "F6_E3M2": 6}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_of(code: str, name: str = "a tensor") -> torch.dtype:
    """``"BF16" → torch.bfloat16``. Raises ``CheckpointError`` where torch has none."""
    if code not in DTYPES:
        raise CheckpointError(
            f"{name} is stored as {code}, and torch has no such dtype, so it cannot be read. "
            "Convert it with the tool that wrote it."
        )
    return DTYPES[code]


def code_of(dtype: torch.dtype, name: str) -> str:
    """``torch.bfloat16 → "BF16"``; ``name`` is the tensor's, for the error."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor {name!r} is {dtype}, which safetensors has no name for, so it cannot be "
            f"saved. Cast it to one of {', '.join(str(known) for known in _CODES)}."
        )
    return _CODES[dtype]


def lies_plain(value: Tensor) -> bool:
    """Are its bytes in memory those of a file? Not if it is strided, or a conjugate view."""
    lazy = value.is_conj() or value.is_neg()
    return value.is_contiguous() and not lazy and value.reshape(-1).stride() == (1,)


def bytes_of(value: Tensor) -> Tensor:
    """The bytes of a dense tensor as a file has them: ``[bytes]`` uint8, a copy or a view."""
    value = value.detach()
    if not lies_plain(value):
        value = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
    return value.reshape(-1).view(torch.uint8)


CAP = 100_000_000
"""Bytes of a header at most; the safetensors library has the same limit."""
PAGE = 4096
"""Bytes that no two ranks write parts of: file systems keep and lock whole pages."""
_PREFIX = 8


class Stored(NamedTuple):
    """A tensor in a file: bytes ``[start, stop)`` of it, counted from the file's first.

    Its shape counts torch's elements, which may be packed.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def encode(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The header of a file that holds these ``(name, dtype, shape)``, in this order, gapless."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + prod(shape) * dtype_of(dtype).itemsize
        elements = [*shape[:-1], shape[-1] * PACKED.get(dtype, 1)] if shape else []
        entries[name] = {"dtype": dtype, "shape": elements, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_PREFIX + len(text)) % PAGE)
    if len(text) > CAP:
        raise CheckpointError(
            f"the header of a file of {len(tensors):,} tensors has {len(text):,} bytes, and "
            f"readers accept {CAP:,}. Lower max_file_size, so that files hold fewer tensors."
        )
    return len(text).to_bytes(_PREFIX, "little") + text


def length_of(prefix: bytes, size: int, file: str) -> int:
    """Bytes of JSON that ``prefix`` announces, the first 8 bytes of a file of ``size`` bytes."""
    if len(prefix) < _PREFIX or size < _PREFIX:
        raise _bad(file, f"it has {size} of the 8 bytes that announce the header")
    length = int.from_bytes(prefix[:_PREFIX], "little")
    if length == 0:
        raise _bad(file, "it announces no header, as a file does whose writer did not finish")
    if length > min(CAP, size - _PREFIX):
        raise _bad(
            file,
            f"it announces a header of {length:,} bytes; there are {size - _PREFIX:,} after the "
            f"first 8, and {CAP:,} at most are accepted",
        )
    return length


def decode(text: bytes, size: int, file: str) -> dict[str, Stored]:
    """A header's tensors, in the order of their bytes, checked against the size of the file."""
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"its header is not JSON ({str(error)[:200]})") from None
    if not isinstance(entries, dict):
        raise _bad(file, f"its header is a JSON {type(entries).__name__}, not an object")
    metadata = entries.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise _bad(file, "its __metadata__ is not an object of texts")
    first = _PREFIX + len(text)
    tensors = {name: _stored(name, entry, first, file) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_gapless(ordered, first, size, file)
    return ordered


def _stored(name: str, entry: Any, first: int, file: str) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, f"tensor {name!r} has no plain dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad(file, f"tensor {name!r} has the dtype {dtype!r:.40}, which is not known here")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise _bad(file, f"tensor {name!r} has a shape or offsets that are no counts")
    start, stop = offsets
    if 8 * (stop - start) != prod(shape) * BITS[dtype]:
        raise _bad(
            file,
            f"tensor {name!r} has bytes {start:,} to {stop:,}, which is not what {dtype} of shape "
            f"{tuple(shape)} takes",
        )
    packed = PACKED.get(dtype, 1)
    if packed > 1 and not (shape and shape[-1] % packed == 0):
        dtype, packed = f"{dtype} in rows of odd length", 1
    elements = (*shape[:-1], shape[-1] // packed) if shape else ()
    return Stored(dtype, elements, first + start, first + stop)


def _are_counts(values: Any) -> bool:
    """A short list of whole numbers that a file could have as sizes."""
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _check_gapless(tensors: Mapping[str, Stored], first: int, size: int, file: str) -> None:
    at = first
    for name, stored in tensors.items():
        if stored.start != at:
            what = "overlaps the one before it" if stored.start < at else "leaves a hole before it"
            raise _bad(file, f"tensor {name!r} begins at byte {stored.start:,} and {what}")
        at = stored.stop
    if at != size:
        raise _bad(file, f"its tensors end at byte {at:,}, and the file at {size:,}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _bad(file: str, fact: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{file} is not a complete safetensors file: {fact}. Nothing of it was used. Fetch or "
        "write it again, or load another checkpoint."
    )


INNER = "training"
"""The one folder in a checkpoint: for what readers of weights must not meet."""


def is_plain(name: object) -> bool:
    """Is it the name of a file in a folder, and no path?"""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and name.isprintable()
        and not set(name) & set("/\\:")
    )


def is_listed(name: object) -> bool:
    """Is it the name of a file in a checkpoint: a plain one, or ``training/`` and a plain one?"""
    return is_plain(name.removeprefix(f"{INNER}/") if isinstance(name, str) else name)


def inside(folder: Path, name: object) -> Path:
    """The file of this name in ``folder``, or in its ``training``.

    A link must lead to a file in the same folder, or to Hugging Face's own store of files, as in
    ``models--…/snapshots/…/model.safetensors → ../../blobs/…``.
    """
    if not is_listed(name):
        raise CheckpointError(
            f"{folder} names {name!r:.80} as one of its files. That is no plain file name, so it "
            "could be any file of this machine; it is not read. Do not trust this folder."
        )
    path = folder / str(name)
    try:
        size_of(path)  # an error where links lead in a circle, which resolve() does not tell
        real, home = path.resolve(), folder.resolve()
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be looked at: {error}. Look at its permissions and at where its "
            "links lead, or copy the file to where the link is."
        ) from error
    cached = home.parent.name == "snapshots" and home.parent.parent / "blobs"
    if real.parent not in (home, home / INNER, cached):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {real}, and is not read. Do not trust "
            "this folder, or copy the file to where the link is."
        )
    return path
