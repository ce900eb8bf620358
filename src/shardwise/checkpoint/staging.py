"""Host memory that a save in the background copies to, and who copies what when.

    save_async() returns        forward, backward                 an optimizer is about to step
    writer       copy 1  write 1  copy 2  write 2  copy 3  write 3          write 4  write 5
    main thread                                                     copy 4  copy 5   step

A step may change parameters as soon as saving returns, so what is not written yet must be copied.
Copies lie in slabs of a pool that never grows beyond its budget; when all are full, the copying
waits for the writing. Slabs stay mapped between saves, since fresh pages cost more than the copy.

Nothing is copied long before it is written, so a save that is done before the next step copies
through a few megabytes. Whatever is left when parameters are about to change, the main thread
copies at once. That nobody changed them before is found by the version counters of the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Event, Lock

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.optimizer_state import params_of
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.target import ShardedModel
from shardwise.checkpoint.writer import Chunk
from shardwise.errors import CheckpointError, ConfigError
from shardwise.listing import size
from shardwise.torch_internals import disable_torch_function, get_version

__all__ = ["Copying", "Pool", "Slab", "Watched", "budget_of"]

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


class Copying:
    """Chunks on their way from where they lie to the writer, in order, through a pool.

    One thread calls ``rest``. The other iterates over ``chunks``; it gives slabs back, so it must
    not wait for room, and copies only where all that was copied is written.
    """

    def __init__(self, chunks: Iterator[Chunk], pool: Pool) -> None:
        self._chunks, self._pool = chunks, pool
        self._copied: SimpleQueue[tuple[Chunk, Slab] | None] = SimpleQueue()
        self._lock = Lock()
        self._stopped = self._failed = self._drained = False
        self.over = Event()
        """All is copied, or no more will be."""

    def rest(self) -> None:
        """Copy all that is not copied yet; waits for room."""
        while not self.over.is_set():
            with self._lock:
                self._copy_one()

    def chunks(self) -> Generator[Chunk]:
        """What is to be written. Each is there until the next is asked for; close it at the end.

        Raises:
            CheckpointError: at the end, if the other thread failed to copy what is missing.
        """
        item: tuple[Chunk, Slab] | None = None
        try:
            while (item := self._next()) is not None:
                yield item[0]
                slab, item = item[1], None
                self._pool.give_back(slab)
        finally:
            if item is not None:
                self._pool.give_back(item[1])
            self.drain()
        if self._failed:
            raise CheckpointError("what was to be saved could not all be copied")

    def drain(self) -> None:
        """Copy no more, and give all slabs back, or whoever copies would wait for room.

        Of the thread that iterates over ``chunks``; of any, where none does.
        """
        self._stopped = True
        while not self._drained and (item := self._next()) is not None:
            self._pool.give_back(item[1])

    def _next(self) -> tuple[Chunk, Slab] | None:
        # Where the lock is taken, the other thread is copying, and something will come. Where it
        # is not, that thread may just have filled the pool: then there is something, too.
        if self._copied.empty() and self._lock.acquire(blocking=False):
            try:
                if self._copied.empty():
                    self._copy_one()
            finally:
                self._lock.release()
        item = self._copied.get()
        self._drained = item is None
        return item

    def _copy_one(self) -> None:
        if self.over.is_set():
            return
        item: tuple[Chunk, Slab] | None = None
        try:
            chunk = None if self._stopped else next(self._chunks, None)
            item = None if chunk is None else self._pool.keep(chunk)
        except BaseException:
            self._failed = True
            raise
        finally:
            if item is None:
                self._pool.rewind()
                self.over.set()
            self._copied.put(item)


class Watched:
    """Parameters, their shards and optimizer state, that nothing but a step may change.

    Writing through ``param.data`` moves no counter, and is not found. Giving it another tensor is
    where that is copied into the shard; where nothing is split, the shard moves to other memory.
    """

    def __init__(self, sharded: ShardedModel, optimizers: Iterable[Optimizer]) -> None:
        with disable_torch_function():  # of guarded parameters
            named = _named(sharded, optimizers)
            self._seen = [(name, value, _version(value)) for name, value in named]

    def changed(self) -> str:
        """What was written to since; ``""`` if nothing was."""
        with disable_torch_function():
            names = [name for name, value, version in self._seen if _version(value) != version]
        more = f" and {len(names) - 1:,} more" * (len(names) > 1)
        return f"{names[0]}{more}" if names else ""


def _named(sharded: ShardedModel, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    for bucket in sharded.buckets:
        names_in = [member.name for member in bucket.spec.members]
        yield f"one of the parameters {names_in[0]!r} … {names_in[-1]!r}", bucket.shard
    names: dict[int, str] = {}
    for name, param in sharded.model.named_parameters():
        names[id(param)] = name
        yield f"parameter {name!r}", param
    for optimizer in optimizers:
        for held in params_of(optimizer):
            for key, value in optimizer.state.get(held, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {key!r} of {names.get(id(held))!r}", value


def _version(value: Tensor) -> int | None:
    """``None`` for what was made in inference mode, which has no counter."""
    try:
        return get_version(value)
    except RuntimeError:
        return None
