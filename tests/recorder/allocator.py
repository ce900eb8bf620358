"""Memory of a device as torch's caching allocator hands it out: rounded, in segments, by stream.

    a block    a multiple of 512 bytes, the smallest free one that is large enough
    a segment  2 MiB for blocks up to 1 MiB, 20 MiB for those up to 10 MiB, else a multiple of 2 MiB
    pinned     the next power of two

A free block serves the stream that has allocated its segment. Segments are never given back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

__all__ = ["Allocator", "Block"]

KIB, MIB = 2**10, 2**20
LEAST, SMALL, MEDIUM = 512, MIB, 10 * MIB


@dataclass(frozen=True)
class Block:
    """A part of a segment."""

    pool: tuple[str, bool]  # the stream, and whether its blocks are small
    segment: int
    start: int
    size: int

    def joins(self, other: Block) -> bool:
        """Does it end where the other begins, or the reverse?"""
        first, second = sorted((self, other), key=lambda block: block.start)
        return self.segment == other.segment and first.start + first.size == second.start


class Allocator:
    """The bytes of a device in use and reserved, and those of pinned memory."""

    def __init__(self) -> None:
        self.used = self.peak = self.reserved = 0
        self.pinned = self.pinned_peak = 0
        self._segments = 0
        self._free = defaultdict[tuple[str, bool], list[Block]](list)

    def begin(self) -> None:
        """Forget the peaks."""
        self.peak, self.pinned_peak = self.used, self.pinned

    def allocate(self, nbytes: int, stream: str) -> Block:
        """Take a block of at least ``nbytes``."""
        size = _rounded(nbytes, LEAST)
        pool = stream, size <= SMALL
        large_enough = [block for block in self._free[pool] if block.size >= size]
        if large_enough:
            block = min(large_enough, key=lambda free: (free.size, free.segment, free.start))
            self._free[pool].remove(block)
        else:
            block = self._new_segment(pool, size)
        if (rest := block.size - size) >= (LEAST if pool[1] else SMALL + 1):
            self._free[pool].append(Block(pool, block.segment, block.start + size, rest))
            block = Block(pool, block.segment, block.start, size)
        self.used += block.size
        self.peak = max(self.peak, self.used)
        return block

    def _new_segment(self, pool: tuple[str, bool], size: int) -> Block:
        whole = 20 * MIB if size < MEDIUM else _rounded(size, 2 * MIB)
        whole = 2 * MIB if pool[1] else whole
        self._segments, self.reserved = self._segments + 1, self.reserved + whole
        return Block(pool, self._segments, 0, whole)

    def free(self, block: Block) -> None:
        """Give a block back; it joins free ones beside it."""
        self.used -= block.size
        free = self._free[block.pool]
        for other in [other for other in free if block.joins(other)]:
            free.remove(other)
            start, size = min(block.start, other.start), block.size + other.size
            block = Block(block.pool, block.segment, start, size)
        free.append(block)

    def pin(self, nbytes: int) -> None:
        """Take pinned memory, or give it back where ``nbytes`` is negative."""
        size = 1 << (abs(nbytes) - 1).bit_length()
        self.pinned += size if nbytes > 0 else -size
        self.pinned_peak = max(self.pinned_peak, self.pinned)


def _rounded(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
