"""All-gather input of a bucket, made of what this rank holds while sharded.

    shard     | piece 2 |                 at rest, here on the second of two copies
    joined    | piece 1 | piece 2 |       ``load``: its piece comes from host memory;
                                          ``update``: the other copies' pieces come
    sent      a slice of the full bucket  ``fill``: copied or cast, where it is other memory

Most buckets need one of these at most, or none: then they are the same memory. What was made is
used again until an optimizer may have stepped.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Label, Pending
from shardwise.plan.spec import BucketSpec


class Sent:
    """This rank's all-gather input for a bucket. The output goes to ``full``, shape ``[W * S]``."""

    def __init__(self, spec: BucketSpec, mesh: Mesh, host: HostMemory, full: Tensor) -> None:
        self._spec, self._mesh, self._host, self._loads = spec, mesh, host, spec.in_host
        self._out = self.joined = spec.sent(full)
        if spec.staged is not None:
            self.joined = mesh.shard.memory.shard(self._out.numel(), spec.staged)
        self.piece = spec.piece(self.joined)
        joins = spec.in_host or spec.splits_copies
        self._in_place = spec.allocation.aliased or (joins and spec.staged is None)
        self.expires = joins or (spec.allocation.lasting and not self._in_place)
        self.forget()

    def forget(self) -> None:
        """Drop what was made: it is old, or its memory is gone."""
        self.is_loaded = not self._loads
        self.is_updated = not self._spec.splits_copies
        self.is_filled = self._in_place  # with what the shard holds now, in memory that lasts

    def expire(self) -> None:
        """The shard may be written next."""
        self.forget()
        if self._loads:
            self._host.wait()

    def load(self, shard: Tensor) -> Pending:
        """Copy the shard from host memory to the device."""
        self.is_loaded = True
        return self._host.load(self.piece, shard)

    def update(self, shard: Tensor) -> int:
        """Join the pieces of the ranks that hold copies, a collective; bytes copied here.

        Inside ``copying``.
        """
        moves = not self._loads and shard.data_ptr() != self.piece.data_ptr()
        if moves:
            self.piece.copy_(shard)
        label = Label("update", self._spec.title)
        self._mesh.replicate.all_gather(self.joined, label).wait()
        self.is_updated = True
        return self.piece.nbytes * moves

    def fill(self, shard: Tensor) -> int:
        """Copy or cast to the full bucket; returns how many bytes."""
        source = self.joined if self._loads or self._spec.splits_copies else shard
        self.is_filled = self._spec.allocation.lasting
        self._out.copy_(source)
        return self._out.nbytes
