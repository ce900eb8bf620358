"""Values of Python as JSON, and back, exactly: what a scheduler or a data position is made of.

What JSON lacks is written as an object with one marked key, ``{"$tuple": [1, 2]}``. Only the types
below are known: nothing is ever called, or imported by name, to read a checkpoint.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.safetensors_format import DTYPES, bytes_of, code_of
from shardwise.errors import CheckpointError

MOST_ELEMENTS = 1 << 20
"""Of a tensor that is written as text; a larger one belongs into a safetensors file."""


def encode(value: Any, where: str) -> Any:
    """``value`` as something that ``json.dumps`` writes.

    Args:
        value: numbers, texts, bytes, ``None``, small tensors and arrays, and lists, tuples, sets,
            dicts, deques and counters of them.
        where: what it is, for errors, such as ``"training.position"``.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic) and type(item := value.item()) is not type(value):
        return encode(item, where)
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if type(value) in (list, tuple, set, frozenset, deque):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        made = [encode(item, f"{where}[{k}]") for k, item in enumerate(items)]
        return made if type(value) is list else {f"${type(value).__name__}": made}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and _torch_has(value.dtype):
        return {"$array": _encode_tensor(torch.from_numpy(np.array(value, order="C")), where)}
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return {"$tensor": _encode_tensor(value, where)}
    kind = f" of {value.dtype}" if isinstance(value, (np.ndarray, Tensor)) else ""
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}{kind}, which only "
        "pickle could store, and loading a pickle can run any code. Store only numbers, strings, "
        "bytes, small tensors, and lists and dicts of them."
    )


def decode(value: Any) -> Any:
    """Return what ``encode`` was given. Raises ``CheckpointError`` for what it did not write."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if len(value) != 1 or not mark.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    if mark not in _DECODERS:
        raise CheckpointError(
            f"the training state marks a value as {mark!r:.40}, which this shardwise does not "
            "know. Install a later one."
        )
    try:
        return _DECODERS[mark](value[mark])
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the training state holds a {mark[1:]} that cannot be read ({error}). Load another "
            "checkpoint."
        ) from None


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and type(value) in (dict, OrderedDict, defaultdict):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    items = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": items}


def _torch_has(dtype: np.dtype[Any]) -> bool:
    """Has torch this dtype? Not in another byte order, and no long double."""
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.numel() > MOST_ELEMENTS:
        raise CheckpointError(
            f"{where} is a tensor of {value.numel():,} elements; up to {MOST_ELEMENTS:,} are "
            "written into the training state. Store it in a buffer of the model."
        )
    text = base64.b64encode(bytes_of(value.cpu()).numpy().tobytes()).decode()
    return {"dtype": code_of(value.dtype, where), "shape": list(value.shape), "data": text}


def _decode_tensor(fields: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(fields["data"], validate=True))
    dtype, shape = DTYPES[fields["dtype"]], fields["shape"]
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no tensor of shape {shape}")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _pairs(pairs: list[list[Any]]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in pairs}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(map(decode, items)),
    "$set": lambda items: set(map(decode, items)),
    "$frozenset": lambda items: frozenset(map(decode, items)),
    "$deque": lambda items: deque(map(decode, items)),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$array": lambda fields: _decode_tensor(fields).numpy(),
    "$tensor": _decode_tensor,
    "$dict": _pairs,
    "$counter": lambda pairs: Counter(_pairs(pairs)),
}
