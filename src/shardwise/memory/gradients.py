"""The gradient side of a bucket: collect, reduce, settle, deliver.

    autograd ─▶ collect ─▶ gradient bucket ─▶ reduce ─▶ settle ─▶ deliver ─▶ shard.grad
               one copy    [W * S], the        sum      mean      added to
               each        reduce's input      [S]                what was there

The ordinary way keeps one tensor per parameter, and copies all of them afterwards. Here each is
written once, where it will be sent from: a large one as soon as it comes, while the processor has
it at hand; small ones together when their call ends, because a call costs more than their bytes.

Between micro-batches that are not reduced, ``.grad`` is the parameter's slot in the gradient
bucket, as it is this rank's sum in plain torch: what is done to it is done to what will be
reduced, and what is taken away from there (``zero_grad()``) will not be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Label
from shardwise.comm.reduction import PendingReduction
from shardwise.errors import RanksDisagree, ShardUseError
from shardwise.memory.grad_hooks import Arrivals
from shardwise.memory.mean import Mean
from shardwise.memory.shard_tensor.sharded_parameter import LocalGradient, is_of_shard, put_grad
from shardwise.plan.spec import BucketSpec
from shardwise.torch_internals import (
    disable_torch_function,
    foreach_copy_,
    foreach_zero_,
    get_grad,
    get_version,
    hooks_of,
    is_sparse,
    set_grad,
    untracked_views,
)


class Gradients:
    """The gradient side of a bucket: collect, reduce, settle, deliver."""

    def __init__(self, spec: BucketSpec, mesh: Mesh, host: HostMemory) -> None:
        self.spec = spec
        self._averages = [(mesh[axis.number], reduction) for axis, reduction in spec.averages]
        self.copied = 0  # bytes
        self.full: Tensor | None = None  # [W * S] while gradients are collected or travel
        self.arrived: set[int] = set()  # those that lie in ``full``
        self._reduced: set[int] = set()  # those that were reduced since the last ``deliver``
        self.trained = frozenset(range(len(spec.members)) if spec.trainable else ())
        self.missing = set(self.trained)  # those that are due since the unit's backward began
        self.aside: dict[int, Tensor] = {}
        self.carries = False  # has a pass that did not reduce written here since the last reduce?
        self._shown: dict[int, Tensor] = {}  # what ``.grad`` is between two passes
        self._is_shown = False  # was memory of ``full`` handed out as a ``.grad``?
        self._versions: dict[int, int] = {}  # of what is shown instead of what is aside
        self._numels = [slot.numel for slot in spec.slots]
        self.arrivals = Arrivals(spec.params, self._numels)
        self.lends = True  # do all gradients come to ``collect``? Not inside full_params()
        self._lent = set[int]()  # slots in which a gradient is computed, and has not come
        self._kept = set[int]()  # those of which another gradient came than was computed there
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}  # to be added to what is lent
        self._bucket: Tensor | None = None  # to collect in; its memory comes and goes
        self._views: list[Tensor] = []  # of it, and then of the gaps between them
        self.reducing: PendingReduction | None = None
        self.mean = Mean(spec, mesh, host)
        self._label = Label("reduce", spec.title)
        for index, param in enumerate(spec.params):
            param.lend_slot = partial(self.lend, index)  # type: ignore[attr-defined]
            param.add_rows = partial(self.add_rows, index)  # type: ignore[attr-defined]

    @property
    def touched(self) -> set[int]:
        """The parameters whose gradients arrived since the last ``deliver``."""
        return self._reduced | self.arrived if self.arrived else self._reduced

    def expect(self, together: bool = False, carried: bool = False, tells: bool = False) -> None:
        """A call begins: small gradients come ``together``, at its end or as the last ``tells``."""
        self.collect_arrivals()  # of an earlier call that is open
        self.missing, self._carried = set(self.trained), carried
        due = len(self.trained.intersection(self.arrivals.small)) - 1 if tells else -1
        self.arrivals.hold(together, due)

    def collect_arrivals(self) -> None:
        """``collect`` the small gradients that came together; others are told of one by one."""
        self.arrivals.hold(False)
        if not self.arrivals:
            return
        indices, grads = self.arrivals.take(self.spec.params)
        dense = {*map(type, grads)} == {Tensor} and True not in map(is_sparse, grads)
        if dense and (self._lent | self.arrived).isdisjoint(indices):
            self._ready_to_collect(self._carried)
            self.arrived.update(indices)
            self.missing.difference_update(indices)
            views = [*map(self._views.__getitem__, indices)]
            foreach_copy_(views, grads)
            self.copied += sum(map(self._numels.__getitem__, indices)) * views[0].itemsize
            return
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None:  # a function gave None for its parameter
                self.collect(index, grad, self._carried)

    def set_aside(self) -> None:
        """Move the shards' ``.grad`` out of autograd's way; ``deliver`` adds to them."""
        self.adopt()
        with disable_torch_function():
            for index, grad in enumerate(map(get_grad, self.spec.params)):
                if grad is not None:
                    if index not in self._shown:
                        self.aside[index] = grad
                    set_grad(self.spec.params[index], None)
        self._shown.clear()

    def show(self) -> None:
        """Set ``.grad`` after a pass that did not reduce: what was collected, or set aside."""
        self._leave()  # by ``inputs=`` of a pass what was computed in a slot may not come back
        self._is_shown = self._is_shown or bool(self.arrived)
        with disable_torch_function():
            for index in self.arrived:
                if index in self.aside:  # with a version of its own, which tells of writes
                    self._views[index] = self._views[index].data
                    self._versions[index] = get_version(self._views[index])
                self._shown[index] = view = self._views[index]
                view.__class__ = LocalGradient
            unused = {i: self.aside.pop(i) for i in self.aside.keys() - self.arrived}
            for index, grad in (self._shown | unused).items():
                put_grad(self.spec.params[index], grad)

    def adopt(self) -> None:
        """Do to what was collected what was done to ``.grad`` since ``show``, or raise."""
        if not self._shown:
            return
        with disable_torch_function():
            for index, view in tuple(self._shown.items()):
                grad = get_grad(self.spec.params[index])
                if grad is None or is_of_shard(grad, view):
                    self._forget(index)
                    continue
                if grad is not view:
                    view.copy_(grad)
                self._adopt_aside(index, view)
        if not self.arrived:
            self._release()

    def _adopt_aside(self, index: int, view: Tensor) -> None:
        if index not in self.aside or get_version(view) == self._versions[index]:
            return
        if view.any():
            raise ShardUseError(
                f"the gradient of {self.spec.members[index].name!r} was modified between "
                "micro-batches: one part of it is averaged over the ranks, and the part in .grad "
                "is not, so the change cannot be applied to both. Set it to zero or to None, or "
                "change it before the first or after the last micro-batch."
            )
        self.aside[index].zero_()

    def was_added_to(self, index: int, grad: Tensor) -> bool:
        """Did autograd add ``grad`` to what is shown, before we knew that a pass had begun?"""
        if self._shown.get(index) is not grad:
            return False
        if index in self._versions:
            self._versions[index] += 1
        return True

    def _forget(self, index: int) -> None:
        for kept in (self.arrived, self._reduced):
            kept.discard(index)
        for shown in (self._shown, self.aside):
            shown.pop(index, None)

    def is_reduced(self) -> bool:
        """Have all collected gradients been reduced, or thrown away by the user?"""
        self.adopt()
        self.carries = bool(self.arrived)
        return not self.carries

    def restore(self) -> None:
        """Set ``.grad`` to what was set aside."""
        self.arrivals.hold(False)
        self.arrivals.take(self.spec.params)  # if the pass has stopped
        with disable_torch_function():
            for index, grad in self.aside.items():
                put_grad(self.spec.params[index], grad)
        self.aside.clear()

    def drop(self) -> None:
        """Forget what was collected and what is on its way; give the shards' ``.grad`` back."""
        with contextlib.suppress(RanksDisagree):  # the memory must outlive what is in flight
            if self.reducing is not None:
                self.reducing.pending.wait()
            self.mean.value()
        with disable_torch_function():
            for index, view in self._shown.items():
                if get_grad(self.spec.params[index]) is view:
                    set_grad(self.spec.params[index], None)
        self.restore()
        # A transfer may read the bucket still where its group has failed.
        self.full = self._bucket = None
        self.reducing = self.mean.result = self.mean.stored = None
        self._views, self.carries = [], False
        for kept in (self._shown, self.arrived, self._reduced, self._lent, self._rows):
            kept.clear()

    def collect(self, index: int, grad: Tensor, carried: bool) -> bool:
        """Write or add a parameter's whole gradient to its slot; was it the last one missing?

        If it is ``carried``, the bucket outlives this backward pass (accumulation), so it is kept
        in the wide dtype of sums instead of the narrow one that travels.
        """
        self._ready_to_collect(carried)
        is_there = index in self._lent and self._is_back(index, grad)
        again = index in self.arrived
        self.arrived.add(index)
        self.missing.discard(index)
        view = self._views[index]
        if not is_there:
            self._put(view, grad.to_dense() if grad.is_sparse else grad, again)
        for numbers, rows in self._rows.pop(index, ()):
            view.index_add_(0, numbers, rows.to(view.dtype))
        return not self.missing

    def _ready_to_collect(self, carried: bool) -> None:
        if self.full is None:
            self._open(self.spec.dtypes.sum if carried else self.spec.dtypes.collected)
        self.carries = self.carries or carried

    def lend(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """Hand a slot out to compute a gradient of ``dtype`` in; ``None``: it is to be copied.

        Until ``collect`` has it back the bucket is not reduced, freed, or written there, but left.
        """
        hooks = hooks_of(self.spec.params[index])
        taken = index in self.arrived or index in self._lent or index in self._kept
        if taken or hooks or self._shown or self.reducing is not None or not self.lends:
            return None
        if dtype is not (self.spec.dtypes.lent if self.full is None else self.full.dtype):
            return None
        if self.full is None:
            self._open(dtype)
        self._lent.add(index)
        return self._views[index].detach()

    def add_rows(self, index: int, numbers: Tensor, rows: Tensor) -> bool:
        """Add ``[m, d]`` to rows ``[m]`` of a lent slot, when that is back; is one lent?"""
        if index in self._lent:
            self._rows.setdefault(index, []).append((numbers, rows))
        return index in self._lent

    def _is_back(self, index: int, grad: Tensor) -> bool:
        """Is ``grad`` the slot that is lent for it? If not, somebody may have that still."""
        if type(grad) is Tensor and grad.data_ptr() == self._views[index].data_ptr():
            self._lent.remove(index)
            return True
        self._kept.add(index)  # by a hook, or the weight is used twice: not lent again
        self._leave()
        return False

    def _leave(self) -> None:
        """Leave a bucket to those who compute in it; what has arrived moves to a new one."""
        if self.full is None or not self._lent:
            return
        self._lent.clear()
        views, self._bucket = self._views, None
        self._open(self.full.dtype)
        for index in self.arrived:
            self._put(self._views[index], views[index], adds=False)

    def _put(self, view: Tensor, grad: Tensor, adds: bool) -> None:
        if grad is view:  # it was in ``.grad``, and autograd has added to it
            return
        if adds:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.copied += view.nbytes

    def _open(self, dtype: torch.dtype) -> Tensor:
        memory, spec = self._averages[0][0].memory, self.spec
        if self._bucket is not None and self._bucket.dtype is dtype:
            self.full = full = self._bucket
            memory.refill(full.untyped_storage(), full.nbytes)
            return full
        self.full = self._bucket = full = memory.gradient(spec.layout.numel, dtype)
        with untracked_views():
            gaps = [full[start:stop] for start, stop in spec.full_views.gaps]
            self._views = [*spec.full_views(full), *gaps]
        return full

    def _release(self) -> None:
        """Free the gradient bucket; its views stay for the next pass, if its memory is ours alone.

        Not where ``.grad`` shows it, a slot is lent, or the mean lies there.
        """
        self.full, bucket = None, self._bucket
        comm, is_result = self._averages[0][0], self.mean.result is bucket
        is_seen = self._is_shown or bool(self._lent) or is_result
        self._lent.clear()
        if bucket is None or is_seen or comm.size == 1 or comm.memory.shared:
            self._bucket, self._views, self._is_shown = None, [], False
        else:
            comm.memory.free(bucket.untyped_storage())

    def reduce(self) -> None:
        """Issue the reduce-scatter of what was collected; absent gradients count as zero."""
        self._leave()
        spec, mean = self.spec, self.mean
        out = mean.kept.unheld() if mean.result is None else None
        full = self.full if self.full is not None else self._open(spec.dtypes.collected)
        if unwritten := {*range(len(self._views))} - self.arrived:
            foreach_zero_([*map(self._views.__getitem__, unwritten)])
        comm, reduction = self._averages[0]
        self.reducing = reduction.start(full, comm, self._label, out)
        if self.reducing.sent is not full:  # it was narrowed
            self._release()
            self.full = self.reducing.sent

    def average(self) -> None:
        """Wait for the reduce, let the gradient bucket go, and issue the sum over the copies."""
        if self.reducing is not None:
            self.reducing.pending.wait()
            comm, reduction = self._averages[1]
            self.reducing = reduction.start(self.reducing.out, comm, self._label)
            self._release()

    def settle(self) -> None:
        """Wait for the sums and let the gradient bucket go."""
        if self.reducing is not None:
            self.reducing.pending.wait()
            self.mean.settle(self.reducing)
        self._release()
        self.reducing, self.carries = None, False
        self._reduced |= self.arrived
        self.arrived.clear()

    def deliver(self, used: Sequence[bool], at_rest: bool) -> None:
        """Give each parameter that is ``used`` on any rank its ``.grad``, added to what it had.

        Another one keeps what it had, ``None`` included, as in a plain training step. If they are
        ``at_rest``, they have the shapes of their shards.
        """
        if (mean := self.mean.take()) is not None:
            put = set_grad if at_rest else put_grad
            views, params = self.mean.kept.views(mean), self.spec.params
            with disable_torch_function():
                [*map(put, compress(params, used), compress(views, used))]  # less than a loop
                for index in self.aside:
                    if used[index]:
                        self.aside[index].add_(views[index].to(self.aside[index].device))
            self._reduced.clear()
        if self.aside:
            self.restore()
