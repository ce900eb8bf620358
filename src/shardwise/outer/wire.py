"""Pseudo-gradients as bytes: fp32, fp16 with one scale, or int8 in blocks.

Parameters move by 1e-5 in a few steps, where fp16 has three digits left. So a unit is multiplied by
a power of two before it is rounded, which puts its largest magnitude near 2**14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.comm.codec import Codec
from shardwise.errors import ConfigError

WIRES = ("float32", "float16", "int8")
_TOP = 14  # the exponent that the largest magnitude gets; fp16 ends at 15
_INT8 = Codec(torch.int8)


def check_wire(wire: str) -> str:
    """``wire``, if it is one of ``WIRES``."""
    if wire not in WIRES:
        raise ConfigError(f"wire is {wire!r}; pseudo-gradients are sent in {', '.join(WIRES)}.")
    return wire


def encode(values: Tensor, wire: str) -> bytes:
    """``values``, ``[n]`` float32 in host memory, as bytes."""
    if wire == "float32":
        return values.numpy().tobytes()
    if wire == "int8":
        encoded = torch.empty(_INT8.nbytes(values.numel()), dtype=torch.uint8)
        return _INT8.encode(values, 1, encoded).numpy().tobytes()
    top = float(values.abs().max()) if values.numel() else 0.0
    exponent = _TOP - math.frexp(top)[1] if math.isfinite(top) and top else 0
    scale = math.ldexp(1.0, max(-126, min(126, exponent)))
    return np.float32(scale).tobytes() + (values * scale).half().numpy().tobytes()


def decode(data: bytes, numel: int, wire: str) -> Tensor:
    """The values that were encoded, ``[numel]`` float32."""
    if wire == "float32":
        return torch.from_numpy(np.frombuffer(data, np.float32).copy())
    if wire == "int8":
        row = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        return _INT8.decode(row[None], numel)[0]
    halves = torch.from_numpy(np.frombuffer(data, np.float16, offset=4).copy())
    return halves.float().div_(float(np.frombuffer(data, np.float32, 1)[0]))


def mean(parts: Sequence[bytes], numel: int, wire: str) -> bytes:
    """The mean of what workers sent, in the order of workers, summed in float32."""
    total = torch.zeros(numel)
    for part in parts:
        total += decode(part, numel, wire)
    return encode(total.div_(len(parts)), wire)


def nbytes(numel: int, wire: str) -> int:
    """Bytes of ``numel`` encoded values."""
    if wire == "int8":
        return _INT8.nbytes(numel)
    return 4 * numel if wire == "float32" else 4 + 2 * numel
