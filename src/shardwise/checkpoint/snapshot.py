"""Host memory for what is written in the background: bounded, and kept for the next time.

A step may change parameters as soon as saving returns, so what is not written yet must be copied.
Copies lie in slabs of a pool that never grows beyond its budget; when all are full, the copying
waits for the writing. Slabs stay mapped between saves, since fresh pages cost more than the copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from threading import Condition

import torch
from torch import Tensor

from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.writer import Chunk
from shardwise.errors import ConfigError
from shardwise.listing import size

__all__ = ["Pool", "Slab", "budget_of"]

LARGEST = 16 << 20  # bytes of a slab, if the budget allows for four
MOST = 16 << 30  # bytes that a rank uses if nobody said how many


def budget_of(ranks: int) -> int:
    """Bytes for each of the ``ranks`` of this host: together they use a quarter of its memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(BLOCK, min(MOST, memory // 4 // ranks))


@dataclass(eq=False)
class Slab:
    """Memory for a few chunks: ``used`` bytes are taken, ``waiting`` chunks not yet written."""

    memory: Tensor  # [bytes] uint8
    used: int = 0
    waiting: int = 0


class Pool:
    """Slabs for one rank's snapshots.

    Args:
        budget: bytes of host memory at most; at least one block.
        pinned: page-locked memory, to which a GPU copies faster.
    """

    def __init__(self, budget: int, pinned: bool = False) -> None:
        if budget < BLOCK:
            raise ConfigError(
                f"snapshot_bytes is {budget:,}; at least {BLOCK:,} are needed ({size(BLOCK)}, one "
                "block of a file)."
            )
        self._slab = max(BLOCK, min(LARGEST, budget // 4))
        self._most = budget // self._slab
        self._pinned = pinned
        self._changed = Condition()
        self._free: list[Slab] = []
        self._made = 0
        self._open: Slab | None = None  # the one that is being filled

    @property
    def room(self) -> int:
        """Bytes that surely fit, however they are cut into chunks of at most a block."""
        return self._most * (self._slab - BLOCK)

    @property
    def nbytes(self) -> int:
        """What it holds now."""
        return self._made * self._slab

    def keep(self, chunk: Chunk) -> tuple[Chunk, Slab]:
        """A copy of the chunk; waits for room. Give the slab back once it is written."""
        length = chunk.stop - chunk.start
        slab, at = self._take(length)
        try:
            for piece in chunk.pieces:
                slab.memory[at : at + len(piece)].copy_(piece)
                at += len(piece)
        except BaseException:
            self.give_back(slab)
            raise
        return chunk._replace(pieces=(slab.memory[at - length : at],)), slab

    def give_back(self, slab: Slab) -> None:
        """One of its chunks is written."""
        with self._changed:
            slab.waiting -= 1
            self._free_if_done(slab)
            self._changed.notify_all()

    def _take(self, length: int) -> tuple[Slab, int]:
        with self._changed:
            if self._open is not None and self._open.used + length > len(self._open.memory):
                full, self._open = self._open, None
                self._free_if_done(full)
            if self._open is None:
                self._open = self._another()
            slab, at = self._open, self._open.used
            slab.used += length
            slab.waiting += 1
            return slab, at

    def _another(self) -> Slab:
        while not self._free and self._made == self._most:
            self._changed.wait()
        if not self._free:
            with torch.inference_mode(False):  # else nobody could write to it outside that mode
                memory = torch.empty(
                    self._slab, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
                )
            self._made += 1
            return Slab(memory)
        return self._free.pop()

    def _free_if_done(self, slab: Slab) -> None:
        if slab.waiting == 0 and slab is not self._open:
            slab.used = 0
            self._free.append(slab)

    def rewind(self) -> None:
        """A snapshot is complete: the next one begins in a slab of its own."""
        with self._changed:
            last, self._open = self._open, None
            if last is not None:
                self._free_if_done(last)
                self._changed.notify_all()
