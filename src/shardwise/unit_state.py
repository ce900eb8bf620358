"""A unit at work: its buckets, and who is using them right now."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Label
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
        gathered: its parameters are whole, or on their way.
        trainable: the buckets that take part in backward passes.
    """

    name: str
    buckets: tuple[Bucket, ...]
    depth: int = 0
    visits: Visits = field(default_factory=Visits)
    pinned: bool = False
    reducing: bool = False
    gathered: bool = False

    def __post_init__(self) -> None:
        self.trainable = [bucket for bucket in self.buckets if bucket.trainable]

    @property
    def homes(self) -> frozenset[int]:
        """The identities of the storages that hold its parameters while they are whole."""
        return frozenset([bucket.storage_key for bucket in self.buckets])

    @property
    def in_use(self) -> bool:
        """Does a call, a backward pass or something outside read its parameters?"""
        return self.depth > 0 or self.pinned or bool(self.visits.open())

    @property
    def collected(self) -> bool:
        """Has a pass written gradients here since the last reduce, thrown away by now or not?"""
        for bucket in self.trainable:
            if bucket.gradients.carries or bucket.gradients.full is not None:
                return True
        return False

    @property
    def complete(self) -> bool:
        """Has every trainable parameter's gradient arrived since the last visit began?"""
        return all(b.gradients.complete for b in self.trainable)

    @property
    def wholly_trained(self) -> bool:
        """Has every parameter a gradient, so that none is needed once all of them are there?"""
        return all(len(b.gradients.trained) == len(b.params) for b in self.buckets)

    def _keep_written(self) -> None:
        """Keep what was written to parameters while they were whole.

        Ranks that map the same memory wait for each other before they write to it, since a peer may
        still compute with it, and after it, since they read each other's parts next.
        """
        written = [bucket for bucket in self.buckets if bucket.is_written()]
        if not written:
            return
        fences = [bucket.spec.shard for bucket in written if bucket.home.shared][:1]
        for comm in fences:
            comm.fence(Label("fence", "written parameters"))
        for bucket in written:
            bucket.keep_written()
        for comm in fences:
            comm.fence(Label("fence", "written parameters"))

    def gather(self) -> None:
        self.gathered = True
        for bucket in self.buckets:
            bucket.gather()

    def ready(self) -> None:
        self.gathered = True
        for bucket in self.buckets:
            bucket.ready()

    def free(self) -> None:
        try:
            self._keep_written()
        finally:
            self.gathered = False
            for bucket in self.buckets:
                bucket.free()

    def shelve(self) -> None:
        """Between steps: what was gathered or cast is old as soon as an optimizer steps."""
        try:
            if self.gathered:
                self._keep_written()
        finally:
            self.gathered = False
            for bucket in self.buckets:
                bucket.expire()
                bucket.free(still_read=True)

    def show_shards(self) -> None:
        """After a pass that stopped: parameters and ``.grad`` of a unit at rest. Nobody waits."""
        for bucket in () if self.depth else self.buckets:
            bucket.rest()
            bucket.gradients.give_back()

    def abandon(self) -> None:
        """Be at rest after a pass that stopped half-way, even if the group is dead by now."""
        self.depth, self.pinned, self.gathered = 0, False, False
        self.visits.clear()
        for bucket in self.buckets:
            with contextlib.suppress(RanksDisagree):
                bucket.free()

    def drop_gradients(self) -> None:
        """Forget what was collected and not reduced, or is on its way."""
        self.reducing = False
        for bucket in self.buckets:
            bucket.gradients.drop()

    def weight(self) -> Weight:
        """Bytes, padding included."""
        gathered = sum(b.layout.numel * b.dtypes.compute.itemsize for b in self.buckets)
        gradients = sum(b.layout.numel * b.dtypes.wire.itemsize for b in self.trainable)
        mean = sum(b.layout.numel * b.dtypes.stored.itemsize for b in self.trainable)
        return Weight(gathered, gradients, mean)
