"""State of a run beside parameters and optimizer: what it needs to go on where it stopped.

Tensors of it are in safetensors files; the rest is one JSON document, ``training.json``. Random
generators are stored as bytes of fixed size, for each rank. With another number of ranks the
numbers that dropout draws cannot be the same, and loading says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.wrappers import bare_record
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.errors.arguments import named

NAME = "training.json"
VERSION = 1
SHORT = 80  # characters of a value in a message


class Stateful(Protocol):
    """A scheduler or a loss scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@named
@dataclass(frozen=True)
class Training:
    """The point that a run has reached.

    Attributes:
        step: optimizer steps taken so far; ``None``: the number in the folder's name.
        scheduler: of the learning rate; its state must be plain values.
        scaler: of the loss.
        position: where in the data the run is: plain values, alike on every rank. What differs,
            as the position of a loader that each rank has of its own does, belongs in ``local``.
        config: what the run was started with: plain values.
        local: plain values of this rank's own.
        metric: how good this checkpoint is, for ``keep_best``: a finite number; rank 0's counts.
    """

    step: int | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    position: Any = None
    config: Any = None
    local: Any = None
    metric: float | None = None


@dataclass(frozen=True)
class Document:
    """``training.json``, decoded."""

    step: int | None
    world: int  # ranks that saved it
    optimizers: list[dict[str, Any]]  # one record for each; see ``optimizer_shards``
    scheduler: Any
    scaler: Any
    position: Any
    config: Any
    local: list[Any]  # each rank's own values, by rank
    # Of the scheduler and the scaler; earlier versions did not store them
    classes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Document:
        """Read it.

        Raises:
            DamagedCheckpoint: it is not what ``document`` returned.
            CheckpointError: a later version wrote it.
        """
        try:
            fields = json.loads(data)
            if fields["version"] != VERSION:
                raise CheckpointError(
                    f"{where} is of version {fields['version']!r:.20}, and this shardwise reads "
                    f"version {VERSION}. Install a later shardwise."
                )
            step, world = fields["step"], int(fields["world"])
            parts = {key: json_codec.decode(fields[key]) for key in _VALUES}
            parts["classes"] = fields.get("classes", {})
            return cls(None if step is None else int(step), world, fields["optimizers"], **parts)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{where} is damaged ({type(error).__name__}: {error}). Load another checkpoint, "
                "or only the weights of this one."
            ) from None


_VALUES = ("scheduler", "scaler", "position", "config", "local")
_ALIKE = _VALUES[:3]  # rank 0's are stored, for all ranks


def values_of(training: Training) -> dict[str, Any]:
    """The values of this rank, as JSON has them."""
    values = {key: getattr(training, key) for key in _VALUES}
    owners = {key: values[key] for key in ("scheduler", "scaler") if values[key] is not None}
    values |= {key: owner.state_dict() for key, owner in owners.items()}
    metric = training.metric
    if metric is not None and not math.isfinite(metric):
        raise CheckpointError(
            f"training.metric is {metric}, which is neither better nor worse than another. Pass "
            "metric=None to save this checkpoint without one."
        )
    encoded = {key: json_codec.encode(value, f"training.{key}") for key, value in values.items()}
    return {**encoded, "classes": {key: type(owner).__name__ for key, owner in owners.items()}}


def facts_of(training: Training, values: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be alike on every rank, as short texts to compare."""
    texts = {key: json.dumps(values[key], sort_keys=True) for key in _ALIKE}
    facts = {f"training.{key}": short_text(text) for key, text in texts.items()}
    return facts | {"training.step": str(training.step)}


def short_text(text: str) -> str:
    """The text, or the beginning of it and a digest."""
    if len(text) <= SHORT:
        return text
    return f"{text[:SHORT]}… (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def document(
    step: int | None,
    values: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    local: Sequence[Any],
) -> bytes:
    """The bytes of ``training.json``.

    Args:
        values: of this rank; only ``local`` may differ by rank.
        local: each rank's ``values["local"]``, by rank.
    """
    fields = {"version": VERSION, "step": step, "world": len(local), **values}
    fields |= {"optimizers": list(optimizers), "local": list(local)}
    return json.dumps(fields, indent=1).encode() + b"\n"


def without_wrappers(data: bytes) -> bytes:
    """The bytes of ``training.json``, with the names that parameters have without wrappers."""
    fields = json.loads(data)
    fields["optimizers"] = [*map(bare_record, fields["optimizers"])]
    return json.dumps(fields, indent=1).encode() + b"\n"


_WORDS = 624  # of a Mersenne Twister
_TAIL = struct.Struct("<qqd")  # position, whether a second normal number waits, that number


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """The state of each generator of this process, ``[bytes]`` uint8 each.

    numpy's global generator is left out where the user put another than the Mersenne Twister.
    """
    _, words, waiting = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": _packed(words[:_WORDS], words[_WORDS], waiting is not None, waiting or 0.0),
    }
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one
    if of_numpy["bit_generator"] == "MT19937":
        inner = of_numpy["state"]
        states["numpy"] = _packed(
            inner["key"], inner["pos"], of_numpy["has_gauss"], of_numpy["gauss"]
        )
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this process's generators to what ``capture_rng`` returned."""
    torch.set_rng_state(states["torch"])
    words, position, waits, number = _unpacked(states["python"])
    random.setstate((3, (*words.tolist(), position), number if waits else None))
    if "numpy" in states:
        np.random.set_state(("MT19937", *_unpacked(states["numpy"])))  # noqa: NPY002 - global
    if device.type in states:
        module = torch.get_device_module(device.type)
        module.set_rng_state(states[device.type], device)


def _packed(words: Sequence[int], position: int, waits: bool, number: float) -> Tensor:
    tail = _TAIL.pack(int(position), bool(waits), float(number))
    data = np.array(words, dtype="<u4").tobytes() + tail
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[np.ndarray, int, int, float]:
    data = state.numpy().tobytes()
    words = np.frombuffer(data, dtype="<u4", count=_WORDS).astype(np.uint32)
    position, waits, number = _TAIL.unpack_from(data, 4 * _WORDS)
    return words, position, waits, number
