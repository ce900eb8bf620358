"""The gradient side of a bucket: collect, reduce, settle, deliver.

    autograd ─▶ collect ─▶ gradient bucket ─▶ reduce ─▶ settle ─▶ deliver ─▶ shard.grad
               one copy    [W * S], the        sum      mean      added to
               each        reduce's input      [S]                what was there

The ordinary way lets autograd keep one tensor per parameter and copies them all together
afterwards. Here each gradient is written where it will be sent from, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.bucket import BucketSpec
from shardwise.comm.protocol import Label, Pending
from shardwise.errors import RanksDisagree
from shardwise.layout import Layout
from shardwise.precision import Averaging

__all__ = ["Gradients"]


class Gradients:
    """The gradient side of a bucket: collect, reduce, settle, deliver."""

    def __init__(self, spec: BucketSpec) -> None:
        self.spec = spec
        self.copied = 0  # bytes
        self.full: Tensor | None = None  # [W * S] while gradients are collected or travel
        self.arrived: set[int] = set()  # those that lie in ``full``
        self.fresh: set[int] = set()  # those that arrived since the unit's backward began
        self.touched: set[int] = set()  # those that arrived since the last ``deliver``
        self.aside: list[Tensor | None] = [None] * len(spec.params)
        self._views: list[Tensor] = []
        self._out: Tensor | None = None
        self._result: Tensor | None = None  # like the shard at rest, in the stored dtype
        self._pending: Pending | None = None
        self._gaps = _gaps(spec.layout)

    def set_aside(self) -> None:
        """Move the shards' ``.grad`` out of autograd's way; ``deliver`` adds to them."""
        for index, param in enumerate(self.spec.params):
            if param.grad is not None:
                self.aside[index], param.grad = param.grad, None

    def drop(self) -> None:
        """Forget what was collected and what is on its way; give the shards' ``.grad`` back."""
        if self._pending is not None:
            with contextlib.suppress(RanksDisagree):  # the memory must outlive what is in flight
                self._pending.wait()
        for index, param in enumerate(self.spec.params):
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
            dtypes = self.spec.dtypes
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
        self.copied += view.numel() * view.element_size()

    def _open(self, dtype: torch.dtype) -> Tensor:
        spec = self.spec
        with torch.inference_mode(False):
            self.full = full = spec.comm.allocate(spec.layout.numel, dtype)
            self._views = spec.full_views(full)
        return full

    def reduce(self, averaging: Averaging) -> None:
        """Issue the reduce-scatter of what was collected; absent gradients count as zero."""
        spec = self.spec
        full = self.full if self.full is not None else self._open(spec.dtypes.wire)
        for index in set(range(len(self._views))) - self.arrived:
            self._views[index].zero_()
        for start, stop in self._gaps:
            full[start:stop].zero_()
        self.full = full = self._narrow(full)
        if averaging.before != 1:
            full.div_(averaging.before)
        if spec.comm.size == 1:
            self._out = full.to(spec.dtypes.sum)
            return
        self._out = spec.comm.allocate(spec.layout.shard_numel, spec.dtypes.sum)
        label = Label("reduce", spec.unit)
        mean = averaging.how == "avg"
        self._pending = spec.comm.reduce_scatter(self._out, full, label, mean)

    def _narrow(self, full: Tensor) -> Tensor:
        """What was carried wide, in the dtype that travels."""
        wire = self.spec.dtypes.wire
        if full.dtype is wire:
            return full
        return self.spec.comm.allocate(full.numel(), wire).copy_(full)

    def settle(self, averaging: Averaging) -> None:
        """Wait for the reduce, form the mean, and let the gradient bucket go."""
        if self._pending is not None:
            self._pending.wait()
        if self._out is not None:
            if averaging.after != 1:
                self._out.div_(averaging.after)
            result = self._spread(self._out.to(self.spec.dtypes.stored))
            self._result = result if self._result is None else self._result.add_(result)
        self.full = self._pending = self._out = None
        self._views = []
        self.arrived.clear()

    def _spread(self, mean: Tensor) -> Tensor:
        """Under ``no_shard`` every rank needs the whole mean; else its own piece is enough."""
        spec = self.spec
        if spec.placement.splits or spec.comm.size == 1:
            return mean
        full = spec.comm.allocate(spec.layout.numel, mean.dtype)
        spec.own(full).copy_(mean)
        spec.comm.all_gather(full, Label("spread", spec.unit)).wait()
        return full

    def deliver(self, used: Sequence[bool]) -> None:
        """Give each parameter its ``.grad``, added to what it had.

        Args:
            used: per parameter, did any rank have a gradient for it? Otherwise it keeps what it
                had, ``None`` included, as in a plain training step.
        """
        result = self._result
        views = [None] * len(used) if result is None else self.spec.rest_views(result)
        for index, (param, mine) in enumerate(zip(self.spec.params, views, strict=True)):
            before, self.aside[index] = self.aside[index], None
            if mine is not None and used[index]:
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
