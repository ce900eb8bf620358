"""Host memory that a save in the background copies to, and who copies what when.

    save_async() returns        forward, backward                 an optimizer is about to step
    writer       copy 1  write 1  copy 2  write 2  copy 3  write 3          write 4  write 5
    main thread                                                     copy 4  copy 5   step

Copies are in buffers of a pool that never grows beyond its budget; when all are full, copying waits
for writing. What the main thread has copied is given back to the kernel as it is written: each
buffer is a mapping, in huge pages, which cost less than half of the copy when they are new.
Before parameters change, the main thread copies all that is left. Version counters of the tensors
show whether they were changed before.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.optimizer_state import params_of
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.writer import Chunk, copy_pieces
from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import CheckpointError
from shardwise.launch.machine_memory import machine_memory
from shardwise.optim.sharded_model import ShardedModel
from shardwise.torch_internals import disable_torch_function, get_version

MOST = 16 << 30  # bytes that a rank uses by default


def budget_of(ranks: int) -> int:
    """Bytes for each of the ``ranks`` of this host: together they use a quarter of its memory."""
    return max(BLOCK, min(MOST, machine_memory(pinned=True) // 4 // ranks))


class Copy(NamedTuple):
    """A chunk whose bytes are in a buffer of the pool."""

    chunk: Chunk
    buffer: Tensor


class Pool:
    """Buffers for the copies of one rank's chunks. One thread copies at a time.

    Args:
        budget: bytes of host memory at most; at least one block.
        pinned: page-locked memory, to which a GPU copies faster.
    """

    def __init__(self, budget: int, pinned: bool = False) -> None:
        self.budget, self.most = budget, budget // BLOCK
        self.count = 0  # of buffers that were made
        self._pinned = pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    def copy(self, chunk: Chunk) -> Copy:
        """A copy of the chunk; waits for a free buffer. Free it once it is written."""
        buffer = self._take()
        try:
            copy_pieces(chunk.pieces, buffer)
        except BaseException:
            self._free.put(buffer)
            raise
        return Copy(chunk._replace(pieces=(buffer[: chunk.stop - chunk.start],)), buffer)

    def free(self, copy: Copy) -> None:
        """The copy is written, or not needed."""
        self._free.put(copy.buffer)

    def clear(self) -> None:
        """Give the memory of free buffers back."""
        self._free, self.count = SimpleQueue(), 0

    def _take(self) -> Tensor:
        if self._free.empty() and self.count < self.most:
            with torch.inference_mode(False):  # else nobody could write to it outside that mode
                if self._pinned:
                    buffer = torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True)
                else:
                    pages = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    buffer = in_huge_pages(torch.frombuffer(pages, dtype=torch.uint8))
            self.count += 1
            return buffer
        return self._free.get()


class Copying:
    """Copies chunks through a pool for the writer, in order.

    The writer iterates over ``chunks`` and copies each itself, until the main thread calls ``rest``
    and copies all that are left. The writer frees buffers, so it must never wait for one: it copies
    only while it has nothing to write.
    """

    def __init__(self, chunks: Iterator[Chunk], pool: Pool) -> None:
        self._chunks, self._pool = chunks, pool
        self._copies: SimpleQueue[Copy | None] = SimpleQueue()  # the main thread's
        self._lock = Lock()  # of who copies
        self._stopped = self._failed = self._drained = False
        self.over = Event()
        """All is copied, or no more will be."""

    def rest(self) -> None:
        """Copy all that is not copied yet; waits for room."""
        with self._lock:
            if self.over.is_set():
                return
            try:
                self._failed = True
                while not self._stopped and (chunk := next(self._chunks, None)) is not None:
                    self._copies.put(self._pool.copy(chunk))
                self._failed = False
            finally:
                self.over.set()
                self._copies.put(None)

    def chunks(self) -> Generator[Chunk]:
        """Yield what is to be written. Each lasts until the next; close it at the end."""
        try:
            while (copy := self._next()) is not None:
                try:
                    yield copy.chunk
                finally:
                    self._let_go(copy)
        finally:
            self.drain()
        if self._failed:
            raise CheckpointError("the state to save could not be copied completely")

    def drain(self) -> None:
        """Copy no more, and free all buffers, or whoever copies would wait for one.

        Called by the thread that iterates over ``chunks``; by any, where none does.
        """
        self._stopped = True
        while not self._drained and (copy := self._next()) is not None:
            self._let_go(copy)
        self._pool.clear()

    def _let_go(self, copy: Copy) -> None:
        if not self.over.is_set():  # else nothing is left to copy
            self._pool.free(copy)

    def _next(self) -> Copy | None:
        copy = self._copy_one() if self._lock.acquire(blocking=False) else self._copies.get()
        self._drained = copy is None
        return copy

    def _copy_one(self) -> Copy | None:
        """The writer's own copy of the next chunk, where the main thread has not copied it."""
        try:
            if self.over.is_set():
                return self._copies.get()  # the main thread's, and None at their end
            chunk = None if self._stopped else next(self._chunks, None)
            if chunk is not None:
                return self._pool.copy(chunk)
            self.over.set()
            return None
        finally:
            self._lock.release()


class Watched:
    """Parameters, their shards and optimizer state, which nothing but a step may change.

    Writing in place through ``param.data`` changes no counter, so it is not detected.
    """

    def __init__(self, sharded: ShardedModel, optimizers: Iterable[Optimizer]) -> None:
        with disable_torch_function():  # of guarded parameters
            named = _named(sharded, optimizers)
            self._seen = [(name, value, _version(value)) for name, value in named]

    def changed(self) -> str:
        """Say why the copy cannot be kept: names of changed tensors. ``""`` if nothing changed."""
        with disable_torch_function():
            names = [name for name, value, version in self._seen if _version(value) != version]
        if not names:
            return ""
        more = f" and {len(names) - 1:,} more" * (len(names) > 1)
        return (
            f"{names[0]}{more} changed after save_async() was called and before an optimizer "
            "stepped, so the copy may mix old and new values, and there is no checkpoint. Before "
            "you modify it in place, call finish_copy() on the result of save_async()."
        )


def _named(sharded: ShardedModel, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    names: dict[int, str] = {}
    for bucket in sharded.buckets:
        members = bucket.spec.members
        yield f"one of the parameters {members[0].name!r} … {members[-1].name!r}", bucket.shard
        for member in members:
            names[id(member.param)] = member.name
            yield f"parameter {member.name!r}", member.param
    for optimizer in optimizers:
        for held in params_of(optimizer):
            for key, value in optimizer.state.get(held, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {key!r} of {names.get(id(held))!r}", value


def _version(value: Tensor) -> int | None:
    """``None`` for a tensor that was made in inference mode, which has no counter."""
    try:
        return get_version(value)
    except RuntimeError:
        return None
