"""Memory that keeps its address and lends its pages: what one tensor frees, the next one fills.

A full bucket has one storage for life, since autograd keeps views of it. If its memory is freed and
allocated anew for each use, either the kernel zeroes it, at ten times the cost of writing to it, or
the allocator keeps it and cuts pieces for others off it, and ever more is touched. So pages move
from address to address (``mremap``): 128 MiB in a millisecond.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

LARGE, PIECE = 1 << 20, 1 << 22  # bytes of a tensor that is worth it, and that move at once
MAY_MOVE, FIXED, KEEP_OLD = 1, 2, 4  # mremap(2): MREMAP_MAYMOVE, _FIXED, _DONTUNMAP

_libc = ctypes.CDLL(None)
_mremap, (_munmap, _madvise) = _libc.mremap, (_libc.munmap, _libc.madvise)
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Pages:
    """The pages that large tensors of this process share, all ranks in threads included."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # start → bytes of each tensor
        self._empty = set[int]()  # starts of those whose pages were taken
        self._spare: dict[int, list[int]] = defaultdict(list)  # bytes → starts of unused pieces
        #: bytes → start and memory, with its pages, of tensors that died
        self._dead: dict[int, list[tuple[int, mmap.mmap]]] = defaultdict(list)

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, uninitialised, in a storage of its own, with pages that were used before."""
        nbytes = numel * dtype.itemsize
        size = -(-nbytes // LARGE) * LARGE  # so that those of other sizes can use the rest
        try:
            start, memory = self._dead[size].pop()
        except IndexError:
            start, memory = self._mapped(size)
        block = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(block, self._end, start, memory).atexit = False
        self.lend(start)  # now: later it would replace what was written there
        return torch.from_numpy(block).view(dtype)

    def _mapped(self, size: int) -> tuple[int, mmap.mmap]:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
        start = np.frombuffer(memory, np.uint8).ctypes.data
        self._sizes[start] = size
        self._empty.add(start)
        return start, memory

    def holds(self, start: int) -> bool:
        """Does one of these tensors start there?"""
        return start in self._sizes

    def lend(self, start: int) -> None:
        """Give pages to the tensor at ``start``; those that are missing come as it is written."""
        if start in self._empty:
            self._empty.remove(start)
            for place, size in self._pieces(start):
                spare = self._spare[size]
                if spare or (size == PIECE and self._take_dead()):
                    with suppress(IndexError):  # another thread took the last
                        _mremap(spare.pop(), size, size, MAY_MOVE | FIXED, place)

    def take(self, start: int) -> None:
        """Take the pages of the tensor at ``start``: its values are not needed any more."""
        if start not in self._empty:
            self._empty.add(start)
            for place, size in self._pieces(start):
                moved = _mremap(place, size, size, MAY_MOVE | KEEP_OLD, None)
                if moved != _FAILED:
                    self._spare[size].append(moved)
                else:  # before Linux 5.7, or with too many pieces
                    _madvise(place, size, mmap.MADV_DONTNEED)

    def trim(self) -> None:
        """Give pages that no tensor uses back to the kernel."""
        while self._take_dead():
            pass
        for size, starts in [*self._spare.items()]:
            with suppress(IndexError):
                while True:
                    _munmap(starts.pop(), size)

    def _take_dead(self) -> bool:
        """Take the pages of a tensor that died, if there is one, and end its memory."""
        for dead in [*self._dead.values()]:
            with suppress(IndexError):
                start, _ = dead.pop()
                self.take(start)
                self._empty.remove(start)
                del self._sizes[start]
                return True
        return False

    def _pieces(self, start: int) -> Iterator[tuple[int, int]]:
        stop = start + self._sizes[start]
        return ((place, min(PIECE, stop - place)) for place in range(start, stop, PIECE))

    def _end(self, start: int, memory: mmap.mmap) -> None:
        self._dead[self._sizes[start]].append((start, memory))
        if sum(map(len, self._dead.values())) == len(self._sizes):
            self.trim()


pages = Pages()
