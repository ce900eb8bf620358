"""Shared memory of several processes of one host that needs no clean-up.

An anonymous file (``memfd_create``) exists as long as a process maps it: it takes no space in
``/dev/shm`` and leaves nothing behind, even after SIGKILL of every rank. Files are far larger than
needed; a page takes memory only once it is touched.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, sleep

import numpy as np
import torch
from torch import Tensor

SIZE = 1 << 40  # bytes of address space per file, if not said; untouched pages cost nothing
PAGE = mmap.PAGESIZE
AWAITED = 1 << 22  # bytes: a smaller block costs less than a wait for peers
PATIENCE, PAUSE = 1.0, 50e-6  # seconds that a block is waited for, and between two looks
_COLLECTING = threading.Lock()  # a collection beside another one returns at once


class Arena:
    """A mapped file. Other processes address tensors in it by their offset."""

    def __init__(self, fd: int) -> None:
        # By ``fd`` other processes open it, until ``close_file``; the mapping stays as long as a
        # tensor in it.
        self.fd, self.size = fd, os.fstat(fd).st_size
        self._map = _mapped(fd, self.size)
        self._base = np.frombuffer(self._map, np.uint8).ctypes.data

    @classmethod
    def create(cls, size: int = SIZE) -> Arena:
        """A new file, open in this process."""
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd)

    @classmethod
    def open(cls, pid: int, fd: int) -> Arena:
        """The file that process ``pid`` has open as ``fd``.

        Raises:
            OSError: there is no such process on this host, or it belongs to another user.
        """
        arena = cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        arena.close_file()
        return arena

    def close_file(self) -> None:
        """Close the file, so that no further process can open it."""
        os.close(self.fd)

    def discard(self, start: int, stop: int) -> None:
        """Give the memory of these pages back; they are zeros when they are touched again."""
        self._map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def block(
        self, offset: int, numel: int, dtype: torch.dtype, freed: Callable[[int], object]
    ) -> Tensor:
        """``[numel]`` at ``offset``, which is ``freed`` when the storage dies."""
        block = np.frombuffer(self._map, np.uint8, numel * dtype.itemsize, offset)
        weakref.finalize(block, freed, offset)
        return torch.from_numpy(block).view(dtype)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` at ``offset``, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def offset_of(self, tensor: Tensor) -> int | None:
        """The offset of ``tensor``, or ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.size else None


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Map the file. Models that are garbage may still hold the address space of earlier ones."""
    try:
        return mmap.mmap(fd, size)
    except OSError:
        with _COLLECTING:
            gc.collect()
        return mmap.mmap(fd, size)


class Ranges:
    """The free bytes of an arena from ``start`` on; free neighbours are merged."""

    def __init__(self, arena: Arena, start: int) -> None:
        self.free = [(start, arena.size)]  # start and stop of each range, ascending, not adjacent

    def take(self, size: int) -> int:
        """The start of ``size`` bytes in the first range that is large enough."""
        index = next(i for i, (start, stop) in enumerate(self.free) if stop - start >= size)
        start, stop = self.free.pop(index)
        if start + size < stop:
            self.free.insert(index, (start + size, stop))
        return start

    def give_back(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Free these blocks: start and stop of each."""
        ascending, self.free = sorted([*self.free, *blocks]), []
        for start, stop in ascending:
            if self.free and self.free[-1][1] == start:
                start, _ = self.free.pop()  # noqa: PLW2901 - merged with the previous range
            self.free.append((start, stop))


class Heap:
    """Allocates blocks of one rank's arena and frees them when their tensors die.

    A freed block is not reused while ``is_being_read`` says that a peer may still read what was
    sent in the collective of this number. It is kept for the next tensor of its size, until
    ``trim``. So of gradient buckets there are two: one that is written, and one that travels or
    that a peer still reads. Where a slow peer reads both, a large one is waited for a while.
    """

    def __init__(self, arena: Arena, is_being_read: Callable[[int], bool]) -> None:
        self.arena = arena
        self._is_being_read = is_being_read
        self._ranges = Ranges(arena, 0)
        self._starts: list[int] = []  # of all blocks, ascending
        self._kept: dict[int, list[int]] = defaultdict(list)  # size → starts of freed blocks
        # start → number of the last collective that sent it
        self._last_read_in: dict[int, int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised. The block is freed when the storage dies."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = -(-numel * dtype.itemsize // PAGE) * PAGE
        offset = self._freed(size)
        if offset is None:
            insort(self._starts, offset := self._ranges.take(size))
        else:
            self._kept[size].remove(offset)
        return self.arena.block(offset, numel, dtype, self._kept[size].append)

    def mark_read_in(self, offset: int, number: int) -> None:
        """Peers will read the block that holds ``offset`` in collective ``number``."""
        self._last_read_in[self._starts[bisect_right(self._starts, offset) - 1]] = number

    def trim(self) -> None:
        """Give the memory of freed blocks back, so that those of other sizes fit in their place."""
        for size, starts in self._kept.items():
            for start in [*self._reusable(size)]:
                starts.remove(start)
                self._starts.remove(start)
                self._last_read_in.pop(start, None)
                self.arena.discard(start, start + size)
                self._ranges.give_back([(start, start + size)])

    def _freed(self, size: int) -> int | None:
        """A freed block of this size; ``None`` if there is none, or peers read it for too long."""
        until = monotonic() + PATIENCE if size >= AWAITED else 0.0
        while (offset := next(self._reusable(size), None)) is None:
            if not self._kept[size] or monotonic() > until:
                break
            sleep(PAUSE)
        return offset

    def _reusable(self, size: int) -> Iterator[int]:
        """Freed blocks of this size that no peer reads any more."""
        for offset in self._kept[size]:
            number = self._last_read_in.get(offset)
            if number is None or not self._is_being_read(number):
                yield offset


class SymmetricHeap:
    """Allocates the same blocks of the common arena on every rank, if all ask in the same order.

    A tensor dies at a different time on every rank, so a block is reused only after every rank
    has it in ``unused``. Bytes before ``start`` are not allocated.
    """

    def __init__(self, arena: Arena, start: int) -> None:
        self._arena, self._ranges = arena, Ranges(arena, start)
        self._sizes: dict[int, int] = {}  # start → bytes of each allocated block
        self.unused: set[int] = set()  # starts of blocks whose tensors are dead on this rank

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised, with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = -(-numel * dtype.itemsize // PAGE) * PAGE
        start = self._ranges.take(size)
        self._sizes[start] = size
        return self._arena.block(start, numel, dtype, self.unused.add)

    def reuse(self, starts: Iterable[int]) -> None:
        """Free the blocks that are unused on every rank; the same on all ranks."""
        for start in sorted(starts):
            self.unused.remove(start)
            self._ranges.give_back([(start, start + self._sizes.pop(start))])
