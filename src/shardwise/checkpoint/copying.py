"""What a save in the background copies, chunk by chunk, by whoever comes first.

    save_async() returns        forward, backward                 an optimizer is about to step
    writer       copy 1  write 1  copy 2  write 2  copy 3  write 3          write 4  write 5
    main thread                                                     copy 4  copy 5   step

Nothing is copied long before it is written, so a save that is done before the next step copies
through a few megabytes. Whatever is left when parameters are about to change, the main thread
copies at once. That nobody changed them before is found by the version counters of the tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Lock
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.checkpoint.optimizers import params_of
from shardwise.checkpoint.snapshot import Pool, Slab
from shardwise.checkpoint.target import ShardedModel
from shardwise.checkpoint.writer import Chunk
from shardwise.errors import CheckpointError
from shardwise.torch_internals import disable_torch_function, get_version

if TYPE_CHECKING:
    from torch.optim import Optimizer


__all__ = ["Copying", "Watched"]


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
            self.let_go()
        if self._failed:
            raise CheckpointError("what was to be saved could not all be copied")

    def let_go(self) -> None:
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

    Writing through ``param.data`` moves no counter, and is not found; giving it another tensor is,
    when the engine takes that over.
    """

    def __init__(self, sharded: ShardedModel, optimizers: Iterable[Optimizer]) -> None:
        with disable_torch_function():  # of guarded parameters
            named = _named(sharded, optimizers)
            self._seen = [(name, value, _version(value)) for name, value in named]

    def changed(self) -> str:
        """What was written to since; ``""`` if nothing was."""
        with disable_torch_function():
            found = [name for name, value, version in self._seen if _version(value) != version]
        more = f" and {len(found) - 1:,} more" * (len(found) > 1)
        return f"{found[0]}{more}" if found else ""


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
