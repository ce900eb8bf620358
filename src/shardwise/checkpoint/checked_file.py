"""A file that is read by blocks, each compared with its checksum, and no block twice in a row.

However many files are read, one of them is open, and one block is in memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from shardwise.checkpoint import checksum
from shardwise.checkpoint.disk import NAPS, retried
from shardwise.checkpoint.plan import BLOCK
from shardwise.errors import DamagedCheckpoint

VECTORS = 512  # pieces of memory in one system call; Linux allows 1,024
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass
class Kept:
    """The one block in memory, and the one open file, whatever the number of files."""

    owner: CheckedFile | None = None  # the file of the block
    number: int = -1  # of the block
    opened: int | None = None  # a file descriptor
    of: CheckedFile | None = None  # the file that is open
    naps: Iterator[float] = field(default_factory=lambda: iter(NAPS))

    @cached_property
    def buffer(self) -> Bytes:
        return np.empty(BLOCK, np.uint8)

    def handle(self, file: CheckedFile) -> int:
        """The file's descriptor; the file is opened, and another one closed, if need be."""
        if self.opened is None or self.of is not file:
            self.close()
            self.opened, self.of = os.open(file.title, os.O_RDONLY), file
        return self.opened

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            os.close(opened)


@dataclass(eq=False)
class CheckedFile:
    """A file: its bytes, with their checksums if they are known."""

    title: str  # its path
    sums: Sequence[int] | None
    kept: Kept
    block: int
    size: int = 0  # bytes when it was opened first

    def open(self) -> None:
        """Open it and set ``size``."""
        self.size = retried(
            f"opening {self.title}",
            lambda: os.fstat(self.kept.handle(self)).st_size,
            self.kept.naps,
        )

    def read(self, start: int, stop: int) -> Bytes:
        """A copy of the bytes ``[start, stop)``, checked."""
        copy = np.empty(stop - start, np.uint8)
        self.read_into(start, copy)
        return copy

    def check(self, start: int, stop: int) -> None:
        """Read all blocks of ``[start, stop)``, and compare them with their checksums."""
        for number in range(start // self.block, -(-stop // self.block)):
            self._block(number)

    def read_into(self, start: int, *into: Bytes) -> None:
        """Fill arrays, one after the other, with the bytes from ``start`` on, checked.

        Whole blocks are read into the arrays, also where a block spans several of them.
        """
        if self.sums is None:
            self._fill(start, *into)
            return
        left, stop = deque(into), start + sum(map(len, into))
        while start < stop:
            number = start // self.block
            first, last = self._ends(number)
            end = min(stop, last)
            pieces = taken(left, end - start)
            if (start, end) == (first, last) and not self._keeps(number):
                self._fill(start, *pieces)
                self._check(number, *pieces)
            else:
                data = self._block(number)[start - first :]
                for piece in pieces:
                    piece[:], data = data[: len(piece)], data[len(piece) :]
            start = end

    def _block(self, number: int) -> Bytes:
        """One block, checked; the next one overwrites it."""
        first, last = self._ends(number)
        data = self.kept.buffer[: last - first]
        if not self._keeps(number):
            self.kept.owner = None
            self._fill(first, data)
            self._check(number, data)
            self.kept.owner, self.kept.number = self, number
        return data

    def _ends(self, number: int) -> tuple[int, int]:
        return number * self.block, min(self.size, (number + 1) * self.block)

    def _keeps(self, number: int) -> bool:
        return self.kept.owner is self and self.kept.number == number

    def _fill(self, at: int, *pieces: Bytes) -> None:
        retried(f"reading {self.title}", lambda: self._read(at, deque(pieces)), self.kept.naps)

    def _read(self, at: int, left: deque[Bytes]) -> None:
        while any(map(len, left)):
            views = [piece.data for piece in islice(left, VECTORS)]
            try:
                done = os.preadv(self.kept.handle(self), views, at)
            except OSError:
                self.kept.close()  # a stale handle stays stale
                raise
            if done == 0:
                raise DamagedCheckpoint(
                    f"{self.title} ends at byte {at:,}, {sum(map(len, left)):,} bytes too early: "
                    "it was cut off. Load another checkpoint, or fetch the file again."
                )
            taken(left, done)
            at += done

    def _check(self, number: int, *pieces: Bytes) -> None:
        if self.sums is None:
            return
        crc = 0
        for piece in pieces:
            crc = checksum.crc32(piece, crc)
        if crc != self.sums[number]:
            first, length = number * self.block, sum(map(len, pieces))
            raise DamagedCheckpoint(
                f"{self.title} is damaged: bytes {first:,} to {first + length:,} are not those "
                f"that were written (block {number} of {len(self.sums)}). Load another "
                "checkpoint, or restore this file from a copy."
            )


def taken(left: deque[Bytes], count: int) -> list[Bytes]:
    """Take the next ``count`` bytes from ``left``, the arrays that are still to be filled."""
    pieces = []
    while count:
        piece = left.popleft()
        if len(piece) > count:
            left.appendleft(piece[count:])
        pieces.append(piece[:count])
        count -= len(pieces[-1])
    while left and not len(left[0]):
        left.popleft()
    return pieces
