"""The mean gradients of a bucket, from the sums over ranks to ``shard.grad``.

sums ─▶ settle ─▶ result ─▶ take                     of copies that have a part each, all of it
[S]               [S]   └─▶ store ─▶ host ─▶ take    is there when ``value`` returns
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount

from torch import Tensor

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Label, Pending
from shardwise.comm.reduction import PendingReduction
from shardwise.plan.spec import BucketSpec
from shardwise.torch_internals import storage_uses, tensor_uses, untracked_views


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


class KeptMean:
    """The memory of the last mean, ``[S]``, with its views, if it ``keeps`` one for the next step.

    To allocate it and to cut it costs a microsecond for each parameter. It is used again only if
    nobody holds it, a view, or what shares its memory: who keeps ``param.grad`` keeps the values of
    its step.
    """

    def __init__(self, cut: Callable[[Tensor], list[Tensor]], keeps: bool) -> None:
        self._cut, self._keeps = cut, keeps
        self._last: tuple[Tensor, list[Tensor], int] | None = None  # it, its views, their number

    @property
    def memory(self) -> Tensor | None:
        """The mean that is kept, whoever holds it."""
        return None if self._last is None else self._last[0]

    def unheld(self) -> Tensor | None:
        """Its memory, if nobody else holds it."""
        if self._last is None:
            return None
        mean, views, uses = self._last
        here = {*map(getrefcount, views)} == {_ALONE} and {*map(tensor_uses, views)} == {1}
        return mean if here and storage_uses(mean) == uses else None

    def views(self, mean: Tensor) -> list[Tensor]:
        """``[S] →`` a view for each parameter, whose version is its own."""
        if self._last is not None and self._last[0] is mean:
            return self._last[1]
        with untracked_views():
            views = self._cut(mean)
        if self._keeps:
            self._last = mean, views, storage_uses(mean)
        return views


_ALONE = next(map(getrefcount, [object()]))  # of what is in one list
