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

    owner: CheckedFile | None = None  # whose block, and which
    number: int = -1
    opened: int | None = None
    of: CheckedFile | None = None  # that is open
    naps: Iterator[float] = field(default_factory=lambda: iter(NAPS))

    @cached_property
    def buffer(self) -> Bytes:
        return np.empty(BLOCK, np.uint8)

    def handle(self, file: CheckedFile) -> int:
        """The file's, which is opened if need be, and then the one before is closed."""
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
    """A file: its bytes, with their checksums if they are known.

    Attributes:
        title: its path.
        block: bytes that have one checksum.
        size: its bytes, when it was opened first.
    """

    title: str
    sums: Sequence[int] | None
    kept: Kept
    block: int
    size: int = 0

    def open(self) -> None:
        """Is it there, and how large is it?"""

        def act() -> int:
            return os.fstat(self.kept.handle(self)).st_size

        self.size = retried(f"opening {self.title}", act, self.kept.naps)

    def read(self, start: int, stop: int) -> Bytes:
        """A copy of the bytes ``[start, stop)``, checked."""
        copy = np.empty(stop - start, np.uint8)
        at = start
        while at < stop:
            data = self.some(at, stop)
            copy[at - start : at - start + len(data)] = data
            at += len(data)
        return copy

    def some(self, start: int, stop: int) -> Bytes:
        """The first bytes of ``[start, stop)``, checked; the next call overwrites them."""
        kept = self.kept
        if self.sums is None:
            kept.owner, data = None, kept.buffer[: min(stop - start, self.block)]
            self._fill(start, data)
            return data
        number = start // self.block
        first, last = number * self.block, min(self.size, (number + 1) * self.block)
        if not self._keeps(number):
            kept.owner = None
            self._fill(first, kept.buffer[: last - first])
            self._check(number, kept.buffer[: last - first])
            kept.owner, kept.number = self, number
        return kept.buffer[start - first : min(stop, last) - first]

    def _keeps(self, number: int) -> bool:
        return self.kept.owner is self and self.kept.number == number

    def is_block(self, at: int, stop: int) -> bool:
        """Does a whole block begin at ``at`` and end before ``stop``, and is it not here yet?"""
        if self.sums is None:
            return True
        return (
            at % self.block == 0
            and stop >= min(self.size, at + self.block)
            and not self._keeps(at // self.block)
        )

    def end_of(self, at: int, stop: int) -> int:
        """Up to where ``block_into`` reads at once."""
        return stop if self.sums is None else min(stop, at + self.block)

    def block_into(self, at: int, pieces: Sequence[Bytes]) -> None:
        """Read the block at ``at`` straight to where it belongs."""
        self._fill(at, *pieces)
        if self.sums is not None:
            self._check(at // self.block, *pieces)

    def _fill(self, at: int, *pieces: Bytes) -> None:
        retried(f"reading {self.title}", lambda: self._read(at, deque(pieces)), self.kept.naps)

    def _read(self, at: int, left: deque[Bytes]) -> None:
        while left:
            views = [piece.data for piece in islice(left, VECTORS)]
            try:
                done = os.preadv(self.kept.handle(self), views, at)
            except OSError:
                self.kept.close()  # a stale handle stays stale
                raise
            if done == 0:
                raise DamagedCheckpoint(
                    f"{self.title} ends at byte {at:,}, {sum(map(len, left)):,} before it "
                    "should. It was cut off. Load another checkpoint, or fetch the file again."
                )
            taken(left, done)
            at += done

    def _check(self, number: int, *pieces: Bytes) -> None:
        assert self.sums is not None
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
    """The next ``count`` bytes of what is still to be filled; they are gone from ``left``."""
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
