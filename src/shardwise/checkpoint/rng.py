"""The random generators of one rank, as bytes of fixed size: torch's, the device's, two more.

Fixed sizes let every rank know where every other rank's state lies in the file; and bytes are
read without running anything, unlike the pickle that a saved generator usually is.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture", "restore"]

_WORDS = 624  # of a Mersenne Twister
_TAIL = struct.Struct("<qqd")  # position, whether a second normal number waits, that number


def capture(device: torch.device) -> dict[str, Tensor]:
    """The state of each generator of this process, ``[bytes]`` uint8 each.

    numpy's global generator is left out where the user put another than the Mersenne Twister.
    """
    found = {"torch": torch.get_rng_state(), "python": _python()}
    ours = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one
    if ours["bit_generator"] == "MT19937":
        words, position = ours["state"]["key"], int(ours["state"]["pos"])
        found["numpy"] = _packed(words, position, bool(ours["has_gauss"]), float(ours["gauss"]))
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device.type).get_rng_state(device)
    return found


def restore(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this process's generators to what ``capture`` found."""
    torch.set_rng_state(states["torch"])
    words, position, waits, number = _unpacked(states["python"])
    random.setstate((3, (*words.tolist(), position), number if waits else None))
    if "numpy" in states:
        words, position, waits, number = _unpacked(states["numpy"])
        state = ("MT19937", words, position, int(waits), number)
        np.random.set_state(state)  # noqa: NPY002 - the global one
    if device.type in states:
        module = torch.get_device_module(device.type)
        module.set_rng_state(states[device.type], device)


def _python() -> Tensor:
    _, words, waiting = random.getstate()
    state = np.array(words[:_WORDS], dtype=np.uint32)
    return _packed(state, words[_WORDS], waiting is not None, waiting or 0.0)


def _packed(words: np.ndarray, position: int, waits: bool, number: float) -> Tensor:
    data = words.astype("<u4").tobytes() + _TAIL.pack(position, waits, number)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[np.ndarray, int, bool, float]:
    data = state.numpy().tobytes()
    words = np.frombuffer(data, dtype="<u4", count=_WORDS).astype(np.uint32)
    position, waits, number = _TAIL.unpack_from(data, 4 * _WORDS)
    return words, position, bool(waits), number
