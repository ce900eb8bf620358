"""One rank's bytes out of files, each range straight to where it belongs.

Ranges are read in the order of the files, whatever order the model has, so no block is read or
checked twice, and beyond the destination there is never more than one block in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.dtypes import dtype_of
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
        return dtype_of(self.place.stored.dtype)

    @property
    def nbytes(self) -> int:
        """As they are stored."""
        return self.out.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Are the stored bytes those that memory is for?"""
        return self.out.device.type == "cpu" and self.out.dtype == self.dtype

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
    for run in _runs(sorted(wants, key=lambda want: want.at)):
        total += sum(want.nbytes for want in run)
        if run[0].is_direct:
            views = (want.out.view(torch.uint8).numpy() for want in run)
            source.read_into(*run[0].at, *views)
        else:
            _convert(source, run[0])
    return total


def _runs(wants: Iterable[Want]) -> Iterator[list[Want]]:
    """Neighbours in a file that can be read at once; the others alone."""
    run: list[Want] = []
    end: tuple[str, int] | None = None
    for want in wants:
        if not want.nbytes:
            continue
        if run and not (want.at == end and want.is_direct and run[0].is_direct):
            yield run
            run = []
        run.append(want)
        end = (want.at[0], want.at[1] + want.nbytes)
    if run:
        yield run


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
