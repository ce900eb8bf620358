"""Shared memory of several processes of one host that needs no clean-up.

An anonymous file (``memfd_create``) exists as long as a process maps it: it takes no space in
``/dev/shm`` and leaves nothing behind, even after SIGKILL of every rank. Files are far larger than
needed; a page takes memory only once it is touched.
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

SIZE = 1 << 40  # bytes of address space per file; untouched pages cost nothing
PAGE = mmap.PAGESIZE


class Arena:
    """A mapped file. Other processes address tensors in it by their offset."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = np.frombuffer(self._map, np.uint8).ctypes.data

    @classmethod
    def create(cls) -> Arena:
        """A new file, open in this process."""
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return cls(fd)

    @classmethod
    def open(cls, pid: int, fd: int) -> Arena:
        """The file that process ``pid`` has open as ``fd``.

        Raises:
            OSError: there is no such process on this host, or it belongs to another user.
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
        """The offset of ``tensor``, or ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < SIZE else None


class Heap:
    """Allocates blocks of one rank's arena and frees them when their tensors die.

    A freed block is not reused while ``is_being_read`` says that a peer may still read what was
    sent in the collective of this number.
    """

    def __init__(self, arena: Arena, is_being_read: Callable[[int], bool]) -> None:
        self.arena = arena
        self._is_being_read = is_being_read
        self._starts: list[int] = []  # of all blocks, ascending: blocks are never merged
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # size → starts
        # start → number of the last collective that sent it
        self._last_read_in: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised. The block is freed when the storage dies."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = -(-(nbytes := numel * dtype.itemsize) // PAGE) * PAGE
        offset = self._reusable(size)
        if offset is None:
            offset, self._end = self._end, self._end + size
            self._starts.append(offset)
        block = self.arena.bytes(offset, nbytes)
        weakref.finalize(block, self._free[size].append, offset)
        return torch.from_numpy(block).view(dtype)

    def mark_read_in(self, offset: int, number: int) -> None:
        """Peers will read the block that holds ``offset`` in collective ``number``."""
        self._last_read_in[self._starts[bisect_right(self._starts, offset) - 1]] = number

    def _reusable(self, size: int) -> int | None:
        offsets = self._free[size]
        for index, offset in enumerate(offsets):
            number = self._last_read_in.get(offset)
            if number is None or not self._is_being_read(number):
                return offsets.pop(index)
        return None


class SymmetricHeap:
    """Allocates the same blocks of the common arena on every rank, if all ask in the same order.

    A tensor dies at a different time on every rank, so a block is reused only after every rank
    has it in ``unused``. Free neighbours are merged, so that another layout of the same model fits.
    Bytes before ``start`` are not allocated.
    """

    def __init__(self, arena: Arena, start: int) -> None:
        self._arena = arena
        self._free = [(start, SIZE)]  # start and stop of each range, ascending, not adjacent
        self._sizes: dict[int, int] = {}  # start → bytes of each allocated block
        self.unused: set[int] = set()  # starts of blocks whose tensors are dead on this rank

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        start = self._take(-(-nbytes // PAGE) * PAGE)
        block = self._arena.bytes(start, nbytes)
        weakref.finalize(block, self.unused.add, start)
        return torch.from_numpy(block).view(dtype)

    def reuse(self, starts: Iterable[int]) -> None:
        """Free the blocks that are unused on every rank; the same on all ranks."""
        for start in sorted(starts):
            self.unused.remove(start)
            self._free.append((start, start + self._sizes.pop(start)))
        ascending, self._free = sorted(self._free), []
        for start, stop in ascending:
            if self._free and self._free[-1][1] == start:
                start, _ = self._free.pop()  # noqa: PLW2901 - merged with the previous range
            self._free.append((start, stop))

    def _take(self, size: int) -> int:
        """Allocate from the first range that is large enough."""
        index = next(i for i, (start, stop) in enumerate(self._free) if stop - start >= size)
        start, stop = self._free.pop(index)
        if start + size < stop:
            self._free.insert(index, (start + size, stop))
        self._sizes[start] = size
        return start
