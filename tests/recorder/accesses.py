"""Accesses to memory, by storage and its life, and faults: what an access has not waited for.

A life begins where memory is allocated and ends where it is freed, by its last reference or by
``resize_``. Memory that is freed goes to what its stream allocates next. So a life's accesses must
all come before its end in the stream that has allocated it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor, UntypedStorage

from shardwise.torch_internals import disable_torch_function, storage_key
from tests.recorder.allocator import Allocator, Block
from tests.recorder.clocks import Stamp, Stream

__all__ = ["Accesses", "Life"]


@dataclass
class Life:
    """Memory from its allocation until it is freed."""

    owner: Stream  # that has allocated it
    is_host: bool
    written: Stamp | None = None  # last
    reads: dict[str, Stamp] = field(default_factory=dict)  # the last of each stream since then
    nbytes: int = 0
    block: Block | None = None  # of the device's memory

    def earlier(self) -> list[Stamp]:
        return [*([self.written] if self.written else []), *self.reads.values()]


class Accesses:
    """Every storage's life, and the faults."""

    def __init__(self, compute: Stream) -> None:
        self.compute, self.allocator = compute, Allocator()
        self.lives: dict[int, Life] = {}
        self.faults: list[str] = []
        self.ends = False

    def of(self, tensor: Tensor) -> Life:
        """The life of a tensor's memory; what was there before the program is the device's."""
        key = storage_key(tensor)
        if key not in self.lives:
            self._track(key, tensor.untyped_storage(), Life(self.compute, is_host=False))
        return self.lives[key]

    def is_host(self, tensor: Tensor) -> bool:
        with disable_torch_function():  # it may be asked of a shard
            life = self.lives.get(storage_key(tensor))
        return life is not None and life.is_host

    def begin(self, tensor: Tensor, owner: Stream, is_host: bool, stamp: Stamp) -> None:
        """Memory was allocated and, perhaps, written."""
        self._track(storage_key(tensor), tensor.untyped_storage(), Life(owner, is_host, stamp))

    def _track(self, key: int, storage: UntypedStorage, life: Life) -> None:
        self.lives[key] = life
        self._allocate(life, storage.nbytes())
        weakref.finalize(storage, self._dies, key, life).atexit = False

    def _allocate(self, life: Life, nbytes: int) -> None:
        life.nbytes = nbytes
        if nbytes and not life.is_host:
            life.block = self.allocator.allocate(nbytes, life.owner.name)

    def pin(self, tensor: Tensor) -> None:
        """Memory of the host was asked for that copies may use."""
        nbytes, pin = tensor.nbytes, self.allocator.pin
        pin(nbytes)
        weakref.finalize(tensor.untyped_storage(), pin, -nbytes).atexit = False

    def _free(self, life: Life) -> None:
        if life.block is not None:
            self.allocator.free(life.block)
            life.block = None

    def read(self, tensor: Tensor, stream: Stream, stamp: Stamp) -> None:
        life = self.of(tensor)
        if life.written is not None and not stream.clock.knows(life.written):
            self._fault("reads", stamp, life, life.written)
        life.reads[stamp.stream] = stamp

    def write(self, tensor: Tensor, stream: Stream, stamp: Stamp) -> None:
        life = self.of(tensor)
        if not tensor.untyped_storage().nbytes() and tensor.numel():
            self.faults.append(f"{stamp.what} ({stamp.stream}) writes memory that was freed")
        for other in life.earlier():
            if not stream.clock.knows(other):
                self._fault("writes", stamp, life, other)
        life.written, life.reads = stamp, {}

    def resize(self, storage: UntypedStorage, nbytes: int, stream: Stream) -> None:
        """``resize_`` is called: a life ends, and another one begins, perhaps."""
        life = self.lives.get(storage._cdata)
        if life is None:
            life = Life(self.compute, is_host=False)
            self._track(storage._cdata, storage, life)
        if storage.nbytes():
            self._end(life)
        life.owner, life.written, life.reads = stream, stream.stamp("refill"), {}
        self._free(life)
        self._allocate(life, nbytes)

    def _dies(self, key: int, life: Life) -> None:
        if self.lives.get(key) is life:
            del self.lives[key]
        self._free(life)
        if not life.is_host:  # which torch keeps until copies have ended
            self._end(life)

    def _end(self, life: Life) -> None:
        if self.ends or life.is_host:
            return
        stamp = life.owner.stamp("free")
        for other in life.earlier():
            if not life.owner.clock.knows(other):
                self._fault("frees", stamp, life, other)

    def _fault(self, verb: str, stamp: Stamp, life: Life, other: Stamp) -> None:
        self.faults.append(
            f"{stamp.what} ({stamp.stream}) {verb} {life.nbytes} bytes of {life.owner} and has not "
            f"waited for {other.what} ({other.stream})"
        )
