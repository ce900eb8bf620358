"""Memory that several processes of one host map, and that nobody has to clean up.

A file without a name (``memfd_create``) lives as long as a process maps it: there is no
``/dev/shm`` to fill and nothing is left behind, even after SIGKILL of every rank. Files are made
far larger than needed; pages exist only once they are touched.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arena", "CommonHeap", "Heap"]

SIZE = 1 << 40  # bytes of address space per file; pages that nobody touches cost nothing
PAGE = mmap.PAGESIZE


class Arena:
    """A mapped file. Tensors in it are known to other processes by their offset."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = np.frombuffer(self._map, np.uint8, 1).ctypes.data

    @classmethod
    def made(cls) -> Arena:
        """A new file, open in this process."""
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return cls(fd)

    @classmethod
    def of(cls, pid: int, fd: int) -> Arena:
        """The file that process ``pid`` has open as ``fd``.

        Raises:
            OSError: there is no such process here, or it belongs to somebody else.
        """
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def bytes(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """``[nbytes]`` at ``offset``."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` at ``offset``, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where ``tensor`` begins, or ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < SIZE else None


class Heap:
    """Gives out blocks of one rank's arena and takes them back when their tensors are gone.

    A block is given out again only when nobody reads it any more, as ``is_being_read`` says.

    Args:
        arena: this rank's own.
        is_being_read: may a peer still read what the collective of this number showed it?
    """

    def __init__(self, arena: Arena, is_being_read: Callable[[int], bool]) -> None:
        self.arena = arena
        self._is_being_read = is_being_read
        self._starts: list[int] = []  # of all blocks, ascending: blocks are never merged
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # size → starts
        self._shown: dict[int, int] = {}  # start → number of the last collective that showed it

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised. It is taken back when its storage dies."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = -(-numel * dtype.itemsize // PAGE) * PAGE
        offset = self._reusable(size)
        if offset is None:
            offset, self._end = self._end, self._end + size
            self._starts.append(offset)
        block = self.arena.bytes(offset, size)
        weakref.finalize(block, self._free[size].append, offset).atexit = False
        return torch.from_numpy(block)[: numel * dtype.itemsize].view(dtype)

    def show(self, offset: int, number: int) -> None:
        """Peers will read the block that holds ``offset`` in collective ``number``."""
        self._shown[self._starts[bisect_right(self._starts, offset) - 1]] = number

    def _reusable(self, size: int) -> int | None:
        offsets = self._free[size]
        for index, offset in enumerate(offsets):
            if not self._is_being_read(self._shown.get(offset, -1)):
                return offsets.pop(index)
        return None


class CommonHeap:
    """Gives out blocks of the common arena: the same to every rank, if all ask in the same order.

    A tensor dies at another moment on every rank. So a block is given out again only after
    every rank has listed it in ``unused``. Blocks are merged: another layout of the same model
    fits in the place of the one before.

    Args:
        arena: the common one.
        start: its first byte that may be given out.
    """

    def __init__(self, arena: Arena, start: int) -> None:
        self._arena = arena
        self._free = [(start, SIZE)]  # start and stop of each range, ascending, none beside another
        self._sizes: dict[int, int] = {}  # start → bytes of each block that is given out
        self.unused: set[int] = set()  # the starts of blocks whose tensors are gone on this rank

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        start = self._take(-(-nbytes // PAGE) * PAGE)
        block = self._arena.bytes(start, nbytes)
        weakref.finalize(block, self.unused.add, start).atexit = False
        return torch.from_numpy(block).view(dtype)

    def reuse(self, starts: Iterable[int]) -> None:
        """Take back the blocks that every rank has let go; the same ones on every rank."""
        for start in sorted(starts):
            self.unused.remove(start)
            self._free.append((start, start + self._sizes.pop(start)))
        ascending, self._free = sorted(self._free), []
        for start, stop in ascending:
            if self._free and self._free[-1][1] == start:
                start, _ = self._free.pop()  # noqa: PLW2901 - one range with the one before
            self._free.append((start, stop))

    def _take(self, size: int) -> int:
        """The first range that is large enough."""
        at = next(i for i, (start, stop) in enumerate(self._free) if stop - start >= size)
        start, stop = self._free.pop(at)
        if start + size < stop:
            self._free.insert(at, (start + size, stop))
        self._sizes[start] = size
        return start
