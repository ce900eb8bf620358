"""The mean gradients of a bucket, from the sums over ranks to ``shard.grad``.

sums ─▶ settle ─▶ result ─▶ take                     of copies that have a part each, all of it
[S]               [S]   └─▶ store ─▶ host ─▶ take    is there when ``value`` returns
"""

from __future__ import annotations

from torch import Tensor

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Label, Pending
from shardwise.comm.reduction import PendingReduction
from shardwise.memory.kept_mean import KeptMean
from shardwise.plan.spec import BucketSpec


class Mean:
    """A bucket's mean gradients that no parameter has yet."""

    def __init__(self, spec: BucketSpec, mesh: Mesh, host: HostMemory) -> None:
        self._spec, self._copies, self._host = spec, mesh.replicate, host
        self.kept = KeptMean(spec.rest_views, spec.keeps_mean)
        self.result: Tensor | None = None  # like the shard at rest, in the stored dtype
        self._spreading: Pending | None = None  # the other copies' parts of it
        self.stored: Tensor | None = None  # the same, in host memory

    def settle(self, reduced: PendingReduction) -> None:
        """Take sums that are complete; where copies have a part each, send this rank's around."""
        spec, copies, sums = self._spec, self._copies, reduced.out
        earlier = None if self.result is None else self.value()
        if not spec.spreads:
            full = sums if sums.dtype is spec.dtypes.stored else sums.to(spec.dtypes.stored)
        else:
            full = reduced.sent
            if not spec.in_place:
                full = copies.memory.gradient(spec.layout.shard_numel, spec.dtypes.stored)
                full.view(copies.size, -1)[copies.rank] = sums
            self._spreading = copies.all_gather(full, Label("spread", spec.title))
        self.result = full
        if earlier is not None:  # a gradient came late; peers may read what is sent, still
            self.value()
            self.result = full + earlier

    def value(self) -> Tensor | None:
        """Return the mean that was settled, ``[S]``, when all parts have come."""
        spreading, self._spreading = self._spreading, None
        if spreading is not None:
            spreading.wait()
        return self.result

    def store(self) -> None:
        """Copy the mean to host memory and let it go here; ``take`` waits for the copy."""
        if not self._spec.in_host or (mean := self.value()) is None:
            return
        stored = self._host.store(mean)
        self.result = None
        if self.stored is not None:  # a gradient came late
            self._host.wait()
            stored.add_(self.stored)
        self.stored = stored

    def take(self) -> Tensor | None:
        """Return the mean, ``[S]``, wherever it is; it is not kept here any more."""
        if self.stored is not None:
            self._host.wait()
            self.result, self.stored = self.stored, None
        if self._spreading is not None:
            self.value()
        mean, self.result = self.result, None
        return mean
