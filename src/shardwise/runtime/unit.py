"""A unit at work: its buckets, which go through a step together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from shardwise.comm.protocol import Label
from shardwise.errors import RanksDisagree
from shardwise.memory.parameters import Bucket
from shardwise.plan.schedule.events import Cue, Op, Phase, UnitBytes
from shardwise.plan.spec import bytes_of


class UnitState:
    """A unit's buckets, one for each combination of dtypes and trainability."""

    def __init__(self, name: str, buckets: tuple[Bucket, ...]) -> None:
        self.name, self.buckets = name, buckets
        self.enters = {phase: Cue(Op.ENTER, name, phase) for phase in Phase}
        self.exits = {phase: Cue(Op.EXIT, name, phase) for phase in Phase}
        self.train([], wholly=False)

    def train(self, buckets: list[Bucket], wholly: bool) -> None:
        """Choose the buckets of backward passes from now on; ``wholly``: all parameters train."""
        self.trainable, self.wholly_trained = buckets, wholly
        gradients = [bucket.gradients for bucket in buckets]
        #: For each event, what is called to carry it out.
        self.actions: dict[Op, list[Callable[[], object]]] = {
            Op.LOAD: [bucket.load for bucket in self.buckets],
            Op.UPDATE: [bucket.update for bucket in self.buckets],
            Op.GATHER: [bucket.gather for bucket in self.buckets],
            Op.FREE: [self.free],
            Op.REDUCE: [of_bucket.reduce for of_bucket in gradients],
            Op.AVERAGE: [of_bucket.average for of_bucket in gradients],
            Op.SETTLE: [of_bucket.settle for of_bucket in gradients],
            Op.STORE: [of_bucket.mean.store for of_bucket in gradients],
        }

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
        for bucket in self.trainable:
            bucket.gradients.collect_arrivals()
        return not any(bucket.gradients.missing for bucket in self.trainable)

    def _keep_written(self) -> None:
        """Keep what was written to parameters while they were whole.

        Ranks that map the same memory wait for each other before they write to it, since a peer may
        still compute with it, and after it, since they read each other's parts next.
        """
        written = [bucket for bucket in self.buckets if bucket.is_written()]
        fences = [bucket.mesh.shard for bucket in written if bucket.allocation.shared][:1]
        for comm in fences:
            comm.fence(Label("fence", "written or detached parameters"))
        for bucket in written:
            bucket.keep_written()
        for comm in fences:
            comm.fence(Label("fence", "written or detached parameters"))

    def free(self, still_read: bool = False) -> None:
        """Point the parameters at shards; ``still_read``: their memory stays."""
        try:
            for bucket in self.buckets:
                if bucket.is_written():
                    self._keep_written()
                    break
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
