"""A unit at work: its buckets, and who is using them right now."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from shardwise.buffers import Bucket
from shardwise.errors import RanksDisagree
from shardwise.schedule import Weight
from shardwise.visits import Visits

__all__ = ["UnitState"]


@dataclass
class UnitState:
    """A unit's buckets, and who is using them right now.

    Attributes:
        name: the unit's name.
        buckets: one for each combination of dtypes and trainability.
        depth: forward calls that are open.
        visits: forward calls whose backward pass is to come.
        pinned: something outside the unit still reads its memory.
        reducing: its gradients are on their way.
    """

    name: str
    buckets: tuple[Bucket, ...]
    depth: int = 0
    visits: Visits = field(default_factory=Visits)
    pinned: bool = False
    reducing: bool = False

    @property
    def trainable(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.trainable]

    @property
    def gathered(self) -> bool:
        return any(bucket.gathered for bucket in self.buckets)

    @property
    def collected(self) -> bool:
        return any(bucket.gradients.full is not None for bucket in self.trainable)

    @property
    def complete(self) -> bool:
        """Has every trainable parameter's gradient arrived since the last visit began?"""
        return all(len(b.gradients.fresh) == len(b.params) for b in self.trainable)

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def ready(self) -> None:
        for bucket in self.buckets:
            bucket.ready()

    def free(self) -> None:
        for bucket in self.buckets:
            bucket.free()

    def abandon(self) -> None:
        """Forget a step that stopped half-way, even if the group is dead by now."""
        self.depth, self.pinned, self.reducing = 0, False, False
        self.visits.clear()
        for bucket in self.buckets:
            with contextlib.suppress(RanksDisagree):
                bucket.free()
            bucket.gradients.drop()

    def weight(self) -> Weight:
        """Bytes, padding included."""
        gathered = sum(b.layout.numel * b.dtypes.compute.itemsize for b in self.buckets)
        gradients = sum(b.layout.numel * b.dtypes.wire.itemsize for b in self.trainable)
        mean = sum(b.layout.numel * b.dtypes.stored.itemsize for b in self.trainable)
        return Weight(gathered, gradients, mean)
