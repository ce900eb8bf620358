"""The names that safetensors gives to dtypes, and how many bytes an element has.

Formats for microscaling (MX) have elements of 4 and 6 bits. torch packs two of 4 bits into one
element, so such a tensor is stored as ``[…, 2 n]`` and is ``[…, n]`` here. It has none of 6 bits:
those are known by name and size, so that the tensors beside them can be read.
"""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError

__all__ = ["BITS", "DTYPES", "PACKED", "code_of", "dtype_of", "itemsize"]

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


def dtype_of(code: str) -> torch.dtype:
    """``"BF16" → torch.bfloat16``. Raises ``CheckpointError`` where torch has none."""
    if code not in DTYPES:
        raise CheckpointError(
            f"a tensor is stored as {code}, and torch has no such dtype, so it cannot be read. "
            "Convert it with the tool that wrote it."
        )
    return DTYPES[code]


def itemsize(code: str) -> int:
    """Bytes of one element of torch's dtype for what safetensors calls ``code``."""
    return dtype_of(code).itemsize


def code_of(dtype: torch.dtype, name: str) -> str:
    """``torch.bfloat16 → "BF16"``; ``name`` is the tensor's, for the error."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor {name!r} is {dtype}, which safetensors has no name for, so it cannot be "
            f"saved. Cast it to one of {', '.join(str(known) for known in _CODES)}."
        )
    return _CODES[dtype]
