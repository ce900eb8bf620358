"""One rank's bytes out of files, each range straight to where it belongs.

Ranges are read in the order of the files, whatever order the model has, so no block is read or
checked twice, and beyond the destination there is never more than one block in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.source import Place, Source

__all__ = ["Want", "fill", "wanted"]


class Want(NamedTuple):
    """Elements of a stored tensor, and the memory they are for.

    Attributes:
        place: the tensor.
        start: the first element of the flattened tensor.
        out: ``[n]``, contiguous, of any dtype, on any device: as many elements as are wanted.
    """

    place: Place
    start: int
    out: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.place.stored.dtype]

    @property
    def at(self) -> tuple[str, int]:
        """The file, and the first byte in it."""
        return self.place.file, self.place.stored.start + self.start * self.dtype.itemsize


def wanted(place: Place, start: int, value: Tensor) -> Want:
    """The elements from ``start`` on that fill ``value``, which is contiguous."""
    return Want(place, start, value.detach().view(-1))


def fill(source: Source, wants: Iterable[Want]) -> int:
    """Read all of them; bytes.

    Raises:
        CheckpointError: bytes are missing or damaged. What was read before is already in place.
    """
    total = 0
    for want in sorted(wants, key=lambda want: want.at):
        total += want.out.numel() * want.dtype.itemsize
        if want.out.device.type == "cpu" and want.out.dtype == want.dtype:
            source.read_into(*want.at, want.out.view(torch.uint8).numpy())
        else:
            _convert(source, want)
    return total


def _convert(source: Source, want: Want) -> None:
    """By way of one block of host memory: to another dtype, or to a device."""
    (file, first), item = want.at, want.dtype.itemsize
    step = BLOCK // item
    buffer = np.empty(min(step, want.out.numel()) * item, np.uint8)
    for k in range(0, want.out.numel(), step):
        part = want.out[k : k + step]
        data = buffer[: part.numel() * item]
        source.read_into(file, first + k * item, data)
        part.copy_(torch.from_numpy(data).view(want.dtype))
