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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arena", "Heap"]

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
