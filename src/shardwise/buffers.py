"""The only owner of big memory: shards, full buckets, gradient buckets.

The ordinary way gathers into a staging buffer and copies every parameter out of it, then
copies every gradient into another one. Here the gathered bucket *is* the parameters' storage
and the gradient bucket *is* what the reduce-scatter reads:

    rank 1 of 3     |  shard 0  |  shard 1  |  shard 2  |
    full bucket     | a a a b b | b c c · · | d d d d · |   gathered: every parameter is a view
    shard                       | b c c · · |               at rest: own views, optimizer's truth
    gradient bucket | a a a b b | b c c · · | d d d d · |   each gradient is written once

Two rules, both because autograd keeps views of what it saw in the forward pass:
a bucket has one storage for life, resized between nothing and full (a new storage would leave
those views stale, silently); and gathers write through a second tensor on that storage, whose
version counter is its own (the views' counters must not move).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.errors import ConfigError
from shardwise.guard import ShardedParameter, Sharding
from shardwise.layout import Layout
from shardwise.precision import Averaging, Dtypes
from shardwise.schedule import Placement
from shardwise.units import Member

__all__ = ["Bucket", "Copies"]


@dataclass
class Copies:
    """Bytes written by our own copies and casts; everything else is the user's or the wire's."""

    parameters: int = 0
    gradients: int = 0


class Bucket:
    """Parameters of one unit, one storage dtype, one compute dtype and one trainability.

    Args:
        unit: the unit's name.
        members: its parameters, in any order; each has a slot of its first name in ``layout``.
        layout: who owns which range.
        dtypes: stored, compute, wire and sum.
        comm: the ranks that split it.
        placement: where parameters live at rest.
    """

    def __init__(
        self,
        unit: str,
        members: Sequence[Member],
        layout: Layout,
        dtypes: Dtypes,
        comm: Comm,
        placement: Placement,
    ) -> None:
        self.unit, self.layout, self.dtypes, self.comm = unit, layout, dtypes, comm
        self.placement = placement
        self.members = tuple(members)
        self.params: list[nn.Parameter] = [member.param for member in members]
        self.trainable = self.params[0].requires_grad
        self.copies = Copies()
        self.gathered = False
        self._pending: Pending | None = None
        self._allocate()
        self._gradients = _Gradients(self)

    # ---- memory at rest ------------------------------------------------------------------

    def _allocate(self) -> None:
        layout, dtypes = self.layout, self.dtypes
        with torch.inference_mode(False):
            self.full = self.comm.allocate(layout.numel, dtypes.compute)  # [W * S]
            own = self.own(self.full)
            at_rest = own if self.placement.splits else self.full
            #: Is the shard a slice of the full bucket, so that gathering copies nothing?
            self.aliased = dtypes.stored is dtypes.compute and (
                self.placement.resident or self.comm.size == 1
            )
            self.shard = (  # [S], or [W * S] when nothing is split
                at_rest if self.aliased else self.comm.allocate(at_rest.numel(), dtypes.stored)
            )
            self.shard.zero_()  # padding stays zero for life
            slots = [layout.slot(member.name) for member in self.members]
            self._full_views = [self.full[s.start : s.stop].view(s.shape) for s in slots]
            self._rest_views = [self._rest_view(i) for i in range(len(slots))]
            self._writer = torch.empty(0, dtype=dtypes.compute, device=self.full.device)
            self._writer.set_(self.full.untyped_storage(), 0, (layout.numel,), (1,))
        self._nbytes = self.full.untyped_storage().nbytes()
        self._release()

    def own(self, full: Tensor) -> Tensor:
        """``[W * S] → [S]``: this rank's piece."""
        size = self.layout.shard_numel
        return full[self.comm.rank * size : (self.comm.rank + 1) * size]

    def _rest_view(self, index: int) -> Tensor:
        return self.local_view(self.shard, index)

    def local_view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter ``index``'s part of ``flat``, which is laid out like the shard at rest."""
        slot = self.layout.slot(self.members[index].name)
        if not self.placement.splits:
            return flat[slot.start : slot.stop].view(slot.shape)
        start, stop = self.layout.local_range(slot, self.comm.rank)
        return flat[start:stop].view(self.layout.shard_shape(slot, self.comm.rank))

    def sharding(self, index: int) -> Sharding:
        """Where parameter ``index``'s elements are."""
        member = self.members[index]
        slot = self.layout.slot(member.name)
        split = self.placement.splits
        start, stop = self.layout.owned(slot, self.comm.rank) if split else (0, slot.numel)
        placement = "fully_sharded" if split else "replicated"
        shape = torch.Size(slot.shape)
        return Sharding(member.name, self.unit, placement, shape, start, stop, slot.atom)

    def take(self, index: int, whole: Tensor) -> None:
        """Copy this rank's part of a whole parameter into the shard."""
        view = self._rest_views[index]
        view.copy_(self.sharding(index).cut(whole.detach(), view.shape))

    @property
    def whole_at_rest(self) -> bool:
        return not self.placement.splits or self.comm.size == 1

    # ---- gather and free -----------------------------------------------------------------

    def gather(self) -> None:
        """Issue the all-gather; ``ready`` waits for it. A gathered bucket stays as it is."""
        if self.gathered:
            return
        self.gathered = True
        self._adopt()
        if self.aliased and self.whole_at_rest:
            return
        self.full.untyped_storage().resize_(self._nbytes)
        if not self.aliased:
            target = self.own(self._writer) if self.placement.splits else self._writer
            target.copy_(self.shard)
            self.copies.parameters += target.numel() * target.element_size()
        if not self.whole_at_rest:
            self._pending = self.comm.all_gather(self._writer, Label("gather", self.unit))

    def ready(self) -> None:
        """Wait for the gather and let the parameters be views of the full bucket."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        elif not self.gathered:
            self.gather()
            self.ready()
            return
        self.bind_whole(self._full_views)

    def free(self) -> None:
        """Let the parameters be shards again, and the full bucket's memory go."""
        if not self.gathered:
            return
        if self._pending is not None:  # gathered ahead and never entered: the peers still send
            self._pending.wait()
            self._pending = None
        self.gathered = False
        self.rest()
        self._release()

    def rest(self) -> None:
        """Let the parameters be what this rank holds at rest."""
        for index in range(len(self.params)):
            self.rest_one(index)

    def rest_one(self, index: int) -> None:
        """The same for one parameter; memory that it had of its own may go."""
        kind = nn.Parameter if self.whole_at_rest else ShardedParameter
        _bind(self.params[index], self._rest_views[index], kind)

    def _release(self) -> None:
        if not self.aliased and not self.placement.resident:
            self.full.untyped_storage().resize_(0)

    def _adopt(self) -> None:
        """Take over values that the user put in place of a shard by ``param.data = ...``."""
        for index, (param, view) in enumerate(zip(self.params, self._rest_views, strict=True)):
            if param.data_ptr() == view.data_ptr():
                continue
            if param.shape != view.shape or param.dtype != view.dtype:
                raise ConfigError(
                    f"parameter {self.members[index].name!r} was replaced by a tensor of shape "
                    f"{tuple(param.shape)}, {param.dtype}; its shard is {tuple(view.shape)}, "
                    f"{view.dtype}. After shard() a model's dtype and device are fixed: set them "
                    "before shard(), or with precision=sw.Precision(...)."
                )
            view.copy_(param.detach())

    # ---- whole values, outside the step --------------------------------------------------

    def whole(self) -> list[Tensor]:
        """Every parameter whole, in its stored dtype, in new memory. A collective."""
        self._adopt_at_rest()
        if self.whole_at_rest:
            full = self.shard.clone()
        else:
            full = torch.empty(
                self.layout.numel, dtype=self.dtypes.stored, device=self.shard.device
            )
            self.own(full).copy_(self.shard)
            self.comm.all_gather(full, Label("whole", self.unit)).wait()
        slots = [self.layout.slot(member.name) for member in self.members]
        return [full[slot.start : slot.stop].view(slot.shape) for slot in slots]

    def _adopt_at_rest(self) -> None:
        if not self.gathered:
            self._adopt()

    def bind_whole(self, wholes: list[Tensor]) -> None:
        """Let the parameters be ``wholes`` until ``rest``."""
        for param, whole in zip(self.params, wholes, strict=True):
            _bind(param, whole, nn.Parameter)

    def holds(self, index: int, whole: Tensor) -> bool:
        """Is this rank's part of parameter ``index`` what ``whole`` says?"""
        view = self._rest_views[index]
        return torch.equal(view, self.sharding(index).cut(whole.detach(), view.shape))

    # ---- gradients -----------------------------------------------------------------------

    @property
    def gradients(self) -> _Gradients:
        return self._gradients


def _bind(param: nn.Parameter, value: Tensor, kind: type[nn.Parameter]) -> None:
    """Let ``param`` be ``value``. Classes that users gave their parameters are left alone."""
    ours = type(param) in (nn.Parameter, ShardedParameter)
    if ours and type(param) is not nn.Parameter:
        param.__class__ = nn.Parameter  # so that .data below is not intercepted
    param.data = value
    if ours and kind is not nn.Parameter:
        param.__class__ = kind


class _Gradients:
    """The gradient side of a bucket: collect, reduce, settle, deliver."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.full: Tensor | None = None  # [W * S] while gradients are collected or travel
        self.arrived: set[int] = set()  # those that lie in ``full``
        self.fresh: set[int] = set()  # those that arrived since the unit's backward began
        self.touched: set[int] = set()  # those that arrived since the last ``deliver``
        self.aside: list[Tensor | None] = [None] * len(bucket.params)
        self._views: list[Tensor] = []
        self._out: Tensor | None = None
        self._result: Tensor | None = None  # like the shard at rest, in the stored dtype
        self._pending: Pending | None = None
        self._gaps = _gaps(bucket.layout)

    def set_aside(self) -> None:
        """Move the shards' ``.grad`` out of autograd's way; ``deliver`` adds to them."""
        for index, param in enumerate(self.bucket.params):
            if param.grad is not None:
                self.aside[index], param.grad = param.grad, None

    def drop(self) -> None:
        """Forget what was collected and what is on its way; give the shards' ``.grad`` back."""
        for index, param in enumerate(self.bucket.params):
            if self.aside[index] is not None:
                param.grad, self.aside[index] = self.aside[index], None
        self.full = self._pending = self._out = self._result = None
        self.arrived.clear()
        self.touched.clear()

    def collect(self, index: int, grad: Tensor, carried: bool) -> None:
        """Write one parameter's gradient into its slot; a second one is added.

        Args:
            index: which parameter.
            grad: its whole gradient.
            carried: the bucket outlives this backward pass (accumulation), so it is kept in the
                wide dtype of sums instead of the narrow one that travels.
        """
        if self.full is None:
            dtypes = self.bucket.dtypes
            self._open(dtypes.sum if carried else dtypes.wire)
        grad = grad.to_dense() if grad.is_sparse else grad
        view = self._views[index]
        if index in self.arrived:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.arrived.add(index)
        self.fresh.add(index)
        self.touched.add(index)
        self.bucket.copies.gradients += view.numel() * view.element_size()

    def _open(self, dtype: torch.dtype) -> Tensor:
        bucket = self.bucket
        with torch.inference_mode(False):
            self.full = full = bucket.comm.allocate(bucket.layout.numel, dtype)
            slots = [bucket.layout.slot(member.name) for member in bucket.members]
            self._views = [full[slot.start : slot.stop].view(slot.shape) for slot in slots]
        return full

    def reduce(self, averaging: Averaging) -> None:
        """Issue the reduce-scatter of what was collected; absent gradients count as zero."""
        bucket = self.bucket
        full = self.full if self.full is not None else self._open(bucket.dtypes.wire)
        for index in set(range(len(self._views))) - self.arrived:
            self._views[index].zero_()
        for start, stop in self._gaps:
            full[start:stop].zero_()
        self.full = full = full.to(bucket.dtypes.wire)
        if averaging.before != 1:
            full.div_(averaging.before)
        if bucket.comm.size == 1:
            self._out = full.to(bucket.dtypes.sum)
            return
        self._out = bucket.comm.allocate(bucket.layout.shard_numel, bucket.dtypes.sum)
        label = Label("reduce", bucket.unit)
        mean = averaging.how == "avg"
        self._pending = bucket.comm.reduce_scatter(self._out, full, label, mean)

    def settle(self, averaging: Averaging) -> None:
        """Wait for the reduce, form the mean, and let the gradient bucket go."""
        if self._pending is not None:
            self._pending.wait()
        if self._out is not None:
            if averaging.after != 1:
                self._out.div_(averaging.after)
            result = self._spread(self._out.to(self.bucket.dtypes.stored))
            self._result = result if self._result is None else self._result.add_(result)
        self.full = self._pending = self._out = None
        self._views = []
        self.arrived.clear()

    def _spread(self, mean: Tensor) -> Tensor:
        """Under ``no_shard`` every rank needs the whole mean; else its own piece is enough."""
        bucket = self.bucket
        if bucket.placement.splits or bucket.comm.size == 1:
            return mean
        full = bucket.comm.allocate(bucket.layout.numel, mean.dtype)
        bucket.own(full).copy_(mean)
        bucket.comm.all_gather(full, Label("spread", bucket.unit)).wait()
        return full

    def deliver(self, used: Sequence[bool]) -> None:
        """Give each parameter its ``.grad``, added to what it had.

        Args:
            used: per parameter, did any rank have a gradient for it? Otherwise it keeps what it
                had, ``None`` included, as in a plain training step.
        """
        for index, param in enumerate(self.bucket.params):
            before, self.aside[index] = self.aside[index], None
            if self._result is not None and used[index]:
                mine = self.bucket.local_view(self._result, index)
                before = mine if before is None else before.add_(mine)
            param.grad = before
        if self._result is not None:
            self._result = None
            self.touched.clear()


def _gaps(layout: Layout) -> list[tuple[int, int]]:
    """The ranges of a bucket that belong to no parameter."""
    edges = [(slot.start, slot.stop) for slot in sorted(layout.slots, key=lambda s: s.start)]
    stops = [0, *(stop for _, stop in edges)]
    starts = [*(start for start, _ in edges), layout.numel]
    return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]
