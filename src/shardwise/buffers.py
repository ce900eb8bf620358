"""The parameter side of a bucket: the shard, the full bucket, and who shows which.

Big memory is owned here and in ``gradients``, nowhere else. The ordinary way gathers into a
staging buffer and copies every parameter out of it, then copies every gradient into another
one. Here the gathered bucket *is* the parameters' storage, and the gradient bucket *is* what
the reduce-scatter reads:

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

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.bucket import BucketSpec
from shardwise.comm.malloc import in_huge_pages
from shardwise.comm.protocol import Label, Pending
from shardwise.errors import ShardUseError
from shardwise.gathered_parameter import GatheredParameter
from shardwise.gradients import Gradients
from shardwise.guard import ShardedParameter
from shardwise.refusals import replaced
from shardwise.sharding import sharding_of
from shardwise.torch_internals import disable_torch_function, get_version, set_data, storage_key

__all__ = ["Bucket"]

_DETACH: Any = Tensor.detach


class Bucket:
    """A bucket's memory: the shard, the full bucket, and which of them the parameters show."""

    def __init__(self, spec: BucketSpec) -> None:
        self.spec = spec
        self.unit, self.layout, self.dtypes = spec.unit, spec.layout, spec.dtypes
        self.members, self.params, self.trainable = spec.members, spec.params, spec.trainable
        self.gradients = Gradients(spec)
        self.gathered = False
        self.copied = 0  # bytes that gathers copied or cast on this rank
        self._pending: Pending | None = None
        self._label = Label("gather", spec.unit)
        self._whole_at_rest = spec.whole_at_rest
        self._memory = spec.shard.memory
        self._allocate()
        #: Do the parameters show the same, whole memory all the time?
        self.stays_whole = self.aliased and self._whole_at_rest
        ours = [p for p in self.params if type(p) in (nn.Parameter, ShardedParameter)]
        #: Whose class changes. Classes that users gave their parameters are left alone.
        self._ours = [] if self.stays_whole else ours
        self._class_at_rest = nn.Parameter if self._whole_at_rest else ShardedParameter
        #: Are all parameters guarded at rest?
        self._guards = len(ours) == len(self.params) and not self._whole_at_rest
        #: Do the parameters show the full bucket?
        self.is_whole = self.stays_whole
        self._handed_out = False  # may a parameter have been written since then?
        self._versions: list[int] = []
        for param in self._ours:
            param.before_write = self._before_write  # type: ignore[attr-defined]

    # ---- memory at rest ------------------------------------------------------------------

    def _allocate(self) -> None:
        spec, dtypes, memory = self.spec, self.dtypes, self._memory
        #: Do all ranks map the same full bucket?
        self.shared = shared = memory.shared
        #: Does the full bucket keep its memory when it is free?
        same = dtypes.stored is dtypes.compute
        self.lasting = shared or spec.placement.resident or (same and self._whole_at_rest)
        #: Is the shard a slice of the full bucket, so that gathering copies nothing?
        self.aliased = self.lasting and same
        self._cast = False  # does a lasting bucket hold what the shard holds now?
        with torch.inference_mode(False):
            self.full = memory.full(self.layout.numel, dtypes.compute)  # [W * S]
            self._full_views = spec.full_views(self.full)
            self._writer = torch.empty(0, dtype=dtypes.compute, device=self.full.device)
            size = (self.layout.numel,)
            self._writer.set_(self.full.untyped_storage(), 0, size, (1,))
            self._own = spec.own(self._writer)
        self._storage = self.full.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.home = storage_key(self.full)  # says of a tensor whether it is a view of a parameter
        self._allocate_shard()
        self._release()

    def _allocate_shard(self) -> None:
        spec = self.spec
        with torch.inference_mode(False):
            size, stored = self.layout.shard_numel, self.dtypes.stored
            self.shard = in_huge_pages(  # [S]
                spec.own(self.full) if self.aliased else self._memory.shard(size, stored)
            )
            self.shard.zero_()  # padding stays zero for life
            self._rest_views = spec.rest_views(self.shard)
        self._addresses = _addresses(self._rest_views)

    def take(self, index: int, whole: Tensor) -> None:
        """Copy this rank's part of a whole parameter into the shard."""
        self._rest_views[index].copy_(self.part(index, whole))

    def part(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of parameter ``index``, or of its gradient, in a ``whole`` one."""
        return self.spec.sharding(index).cut(whole.detach(), self._rest_views[index].shape)

    # ---- gather and free -----------------------------------------------------------------

    def gather(self) -> None:
        """Issue the all-gather; ``ready`` waits for it. A gathered bucket stays as it is."""
        if self.gathered:
            return
        self.gathered = True
        self.adopt()
        if self.stays_whole:
            return
        if not self.lasting:
            self._memory.refill(self._storage, self._nbytes)
        if not self.aliased and not self._cast:
            self._cast = self.lasting
            self._own.copy_(self.shard)
            self.copied += self._own.nbytes
        if not self._whole_at_rest:
            self._pending = self.spec.shard.all_gather(self._writer, self._label)

    def ready(self) -> None:
        """Wait for the gather and let the parameters be views of the full bucket."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        elif not self.gathered:
            self.gather()
            self.ready()
            return
        if self.stays_whole:
            return
        if not self.is_whole:
            with disable_torch_function():
                self._bind(self._full_views, GatheredParameter)
                self._handed_out, self._versions = False, list(map(get_version, self.params))
        elif self.dtypes.stored is not self.dtypes.compute:
            # A change of dtype makes autograd forget the node that adds up a parameter's gradients.
            # So a unit that was kept since its last use must change, too: else the uses of a tied
            # weight would be summed by autograd here and by us there, and strategies would differ.
            written = self.is_written()
            values = list(map(_DETACH, self.params)) if written else self._full_views
            self.rest()
            with disable_torch_function():
                self._bind(values, GatheredParameter)
        self.is_whole = True

    def free(self) -> None:
        """Let the parameters be shards again, and the full bucket's memory go."""
        try:
            if self.gathered:
                self._lay_down()
        finally:
            self._release()

    def shelve(self) -> None:
        """The same, but something still reads the full bucket; and what was cast will be old."""
        self.expire()
        if self.gathered:
            self._lay_down()

    def _lay_down(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:  # gathered ahead and never entered: the peers still send
                pending.wait()
        finally:
            if not self.stays_whole:  # what was put in place of a value is adopted later
                self.rest()
            self.gathered = False  # last: where Ctrl-C comes between, it is done again

    def rest(self) -> None:
        """Let the parameters be what this rank holds at rest."""
        self.is_whole = self.stays_whole
        with disable_torch_function():
            self._bind(self._rest_views, self._class_at_rest)

    def rest_one(self, index: int) -> None:
        """The same for one parameter; memory that it had of its own may go."""
        param = self.params[index]
        if any(param is ours for ours in self._ours):
            param.__class__ = self._class_at_rest
        with disable_torch_function():
            param.data = self._rest_views[index]

    def expire(self) -> None:
        """The optimizer may run next: what was cast for this step will be old."""
        self._cast = False

    def _release(self) -> None:
        if not self.lasting:
            self._memory.free(self._storage)

    def adopt(self) -> None:
        """Take over values that were put in place of a parameter's by ``param.data = ...``.

        A guarded parameter does so itself. Who has read ``param.data`` before keeps the values that
        were there, as of any parameter: where nothing is split, the bucket moves to other memory.
        """
        with disable_torch_function():
            same = _addresses(self.params) == self._addresses
            if same and (self._guards or _shapes(self.params) == _shapes(self._rest_views)):
                return
            for index, (param, view) in enumerate(zip(self.params, self._rest_views, strict=True)):
                if param.shape != view.shape or param.dtype != view.dtype:
                    raise replaced(self.members[index].name, view, param)
            values = [param.detach() for param in self.params]
            if self._whole_at_rest:
                self._allocate() if self.aliased else self._allocate_shard()
            for param, view, value in zip(self.params, self._rest_views, values, strict=True):
                if value.data_ptr() != view.data_ptr():
                    if (sharding := sharding_of(param)) is not None:
                        sharding.end_loans()
                    view.copy_(value)
            self.rest()

    # ---- whole values, outside the step --------------------------------------------------

    def whole(self) -> list[Tensor]:
        """Every parameter whole, in its stored dtype, in new memory. A collective."""
        if not self.gathered:
            self.adopt()
        return self.whole_of(self.shard)

    def whole_of(self, flat: Tensor) -> list[Tensor]:
        """The same of any ``flat`` that is laid out like the shard. A collective."""
        if self.spec.whole_at_rest:
            full = flat.clone()
        else:
            full = torch.empty(self.layout.numel, dtype=flat.dtype, device=flat.device)
            self.spec.own(full).copy_(flat)
            self.spec.shard.all_gather(full, Label("whole", self.unit)).wait()
        return self.spec.full_views(full)

    def bind_whole(self, wholes: list[Tensor]) -> None:
        """Let the parameters be ``wholes``, and plain, until ``rest``."""
        with disable_torch_function():
            self._bind(wholes, nn.Parameter)

    def _bind(self, values: list[Tensor], kind: type[nn.Parameter]) -> None:
        """Let the parameters be ``values``, and ours of class ``kind``."""
        for param in self._ours:
            param.__class__ = kind
        for param, value in zip(self.params, values, strict=True):
            set_data(param, value)

    # ---- written while whole -----------------------------------------------------------------

    def is_written(self) -> bool:
        """May a parameter have been written since it became whole?"""
        if self.stays_whole or not self.is_whole:
            return False
        return (
            self._handed_out
            or list(map(get_version, self.params)) != self._versions
            or (len(self._ours) < len(self.params) and self._is_replaced())
        )

    def keep_written(self) -> None:
        """Take this rank's part of what was written into the shard.

        Raises:
            ConfigError: a parameter was replaced by what its shard cannot hold.
            ShardUseError: all ranks wrote to the memory that they share.
        """
        if self.shared and not self._handed_out:
            raise self._written_by_all()
        with torch.no_grad(), disable_torch_function():
            for index, (param, full) in enumerate(zip(self.params, self._full_views, strict=True)):
                whole = Tensor.detach(param)
                if (whole.shape, whole.dtype) != (full.shape, full.dtype):
                    raise replaced(self.members[index].name, full, whole)
                self._take_written(index, whole)
        self._cast = False

    def _take_written(self, index: int, whole: Tensor) -> None:
        shard = self._rest_views[index]
        part = self.spec.sharding(index).cut(whole, shard.shape)
        if part.dtype is shard.dtype:
            shard.copy_(part)
        else:  # a cast that nobody wrote to is no new value
            written = part != shard.to(part.dtype)
            shard.copy_(torch.where(written, part.to(shard.dtype), shard))

    def _before_write(self) -> None:
        """A parameter may be written next: this rank must write to memory of its own."""
        if not self._handed_out and self.shared:
            with torch.inference_mode(False), disable_torch_function():
                self._bind(self.spec.full_views(self.full.clone()), GatheredParameter)
        self._handed_out = True

    def _is_replaced(self) -> bool:
        return _addresses(self.params) != _addresses(self._full_views)

    def _written_by_all(self) -> ShardUseError:
        versions = map(get_version, self.params)
        changed = (v != before for v, before in zip(versions, self._versions, strict=True))
        names = [m.name for m, one in zip(self.members, changed, strict=True) if one]
        return ShardUseError(
            f"parameter {names[0]!r} was written in a forward pass by a function, while "
            f"{self.spec.shard.size} ranks map the same memory, so each of them wrote to it. Write "
            "by a method of the parameter, such as param.add_(...), which is kept; or call "
            'sw.connect(transport="messages").'
        )

    def close(self) -> None:
        """Let all memory go, once the parameters have other memory. Nothing works after it.

        At once, and not when what refers to this object is found to be garbage: another layout may
        be made next.
        """
        for param in self._ours:
            del param.before_write  # type: ignore[attr-defined]
        self.gradients.drop()
        self.full = self.shard = self._writer = self._own = torch.empty(0)
        self._storage = self.full.untyped_storage()
        self._full_views = self._rest_views = []

    def holds(self, index: int, whole: Tensor) -> bool:
        """Has this rank's part of parameter ``index`` the bits of that in ``whole``?

        Bits, since a NaN is not equal to itself.
        """
        shard, part = self._rest_views[index].reshape(-1), self.part(index, whole).reshape(-1)
        return torch.equal(shard.view(torch.uint8), part.view(torch.uint8))


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _shapes(tensors: Iterable[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]
