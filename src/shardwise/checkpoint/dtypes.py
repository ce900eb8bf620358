"""The names that safetensors gives to dtypes, and how many bytes an element has."""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError

__all__ = ["DTYPES", "code_of", "itemsize"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
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
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def itemsize(code: str) -> int:
    """Bytes of one element of the dtype that safetensors calls ``code``."""
    return DTYPES[code].itemsize


def code_of(dtype: torch.dtype, name: str) -> str:
    """``torch.bfloat16 → "BF16"``; ``name`` is the tensor's, for the error."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor {name!r} is {dtype}, which safetensors has no name for, so it cannot be "
            f"saved. Cast it to one of {', '.join(str(known) for known in _CODES)}."
        )
    return _CODES[dtype]
