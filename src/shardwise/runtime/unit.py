"""A unit at work: its buckets, which go through a step together."""

from __future__ import annotations

import contextlib

from shardwise.comm.protocol import Label
from shardwise.errors import RanksDisagree
from shardwise.memory.gradients import Gradients
from shardwise.memory.parameters import Bucket
from shardwise.plan.schedule.events import Op, UnitBytes
from shardwise.plan.spec import bytes_of

__all__ = ["UnitState"]

OF_PARAMETERS = {Op.LOAD: Bucket.load, Op.UPDATE: Bucket.update, Op.GATHER: Bucket.gather}
OF_GRADIENTS = {Op.REDUCE: Gradients.reduce, Op.SETTLE: Gradients.settle, Op.STORE: Gradients.store}


class UnitState:
    """A unit's buckets, one for each combination of dtypes and trainability."""

    def __init__(self, name: str, buckets: tuple[Bucket, ...]) -> None:
        self.name, self.buckets = name, buckets
        # ``Trained`` sets both:
        self.trainable: list[Bucket] = []  # those that take part in backward passes
        self.wholly_trained: bool  # is every parameter trained?

    @property
    def collected(self) -> bool:
        """Has a pass written gradients since the last reduce? Also if they were thrown away."""
        for bucket in self.trainable:
            if bucket.gradients.carries or bucket.gradients.full is not None:
                return True
        return False

    @property
    def complete(self) -> bool:
        """Has every gradient arrived since the backward pass of the last call began?"""
        return all(b.gradients.complete for b in self.trainable)

    def _keep_written(self) -> None:
        """Keep what was written to parameters while they were whole.

        Ranks that map the same memory wait for each other before they write to it, since a peer may
        still compute with it, and after it, since they read each other's parts next.
        """
        written = [bucket for bucket in self.buckets if bucket.is_written()]
        if not written:
            return
        fences = [bucket.mesh.shard for bucket in written if bucket.allocation.shared][:1]
        for comm in fences:
            comm.fence(Label("fence", "written parameters"))
        for bucket in written:
            bucket.keep_written()
        for comm in fences:
            comm.fence(Label("fence", "written parameters"))

    def carry_out(self, op: Op) -> None:
        """Do what an event says, in each bucket."""
        if op is Op.FREE:
            self.free()
        for bucket in self.buckets if op in OF_PARAMETERS else ():
            OF_PARAMETERS[op](bucket)
        for bucket in self.trainable if op in OF_GRADIENTS else ():
            OF_GRADIENTS[op](bucket.gradients)

    def free(self, still_read: bool = False) -> None:
        """Point the parameters at shards; ``still_read``: their memory stays."""
        try:
            self._keep_written()
        finally:
            for bucket in self.buckets:
                bucket.free(still_read)

    def expire(self, steps_only: bool) -> None:
        """Shards may be written next, or by an optimizer only: what was made of them is old."""
        for bucket in self.buckets:
            bucket.expect_step() if steps_only else bucket.expire()

    def abandon(self, drops: bool) -> None:
        """Be at rest after a pass that stopped half-way, even if the group is dead by now.

        ``drops``: forget what was collected and not reduced, or is on its way.
        """
        for bucket in self.buckets:
            with contextlib.suppress(RanksDisagree):
                bucket.free()
            if drops:
                bucket.gradients.drop()

    def nbytes(self) -> UnitBytes:
        """Bytes, padding included."""
        return bytes_of([b.spec for b in self.buckets], [b.spec for b in self.trainable])
