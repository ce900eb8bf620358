"""The parameter side of a bucket: the shard, the full bucket, and who shows which.

Big memory is owned here and in ``gradients``, nowhere else. Nothing is copied out of a staging
buffer or into one: the gathered bucket *is* the parameters' storage, and the gradient bucket *is*
what the reduce-scatter reads:

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

from enum import Enum, auto

import torch
from torch import Tensor, nn

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.malloc import in_huge_pages
from shardwise.comm.mesh import Mesh
from shardwise.comm.pages import pages
from shardwise.comm.protocol import Label, Pending
from shardwise.memory.gathered_parameter import GatheredParameter
from shardwise.memory.gradients import Gradients
from shardwise.memory.sent import Sent
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.shard_tensor.use_errors import written_by_all_ranks, wrong_replacement
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.plan.spec import BucketSpec
from shardwise.plan.views import addresses_of
from shardwise.torch_internals import (
    disable_torch_function,
    get_grad,
    get_version,
    set_data,
    storage_key,
)

OUR_CLASSES = (nn.Parameter, ShardedParameter)


class State(Enum):
    """State of a bucket between sharded and unsharded."""

    AT_REST = auto()  # parameters show the shard
    IN_FLIGHT = auto()  # the full bucket is being filled; parameters still show the shard
    READY = auto()  # parameters show the full bucket


class Bucket:
    """A bucket's memory: the shard, the full bucket, and which of them the parameters show."""

    def __init__(self, spec: BucketSpec, mesh: Mesh, host: HostMemory) -> None:
        self.spec, self.allocation, self.mesh, self.host = spec, spec.allocation, mesh, host
        self.unit, self.layout, self.dtypes = spec.unit, spec.layout, spec.dtypes
        self.members, self.params, self.trainable = spec.members, spec.params, spec.trainable
        self.gradients = Gradients(spec, mesh, host)
        self.state = State.AT_REST
        self.copied = 0  # bytes that gathers copied or cast on this rank
        self._pending: Pending | None = None
        self._label = Label("gather", spec.title)
        self._memory = mesh.shard.memory
        #: What follows a load or an update waits for it on another stream than computes; where
        #: nothing is waited for, the context is one that costs least.
        beside = spec.in_host or spec.splits_copies
        self._after_loads = host.copying if beside else disable_torch_function
        self._is_current = False  # does a kept full bucket hold what all shards hold now?
        self._allocate()
        #: Is anything made of its shard that is kept until that is written?
        self.expires = spec.kept or self._sent.expires
        ours = [param for param in self.params if type(param) in OUR_CLASSES]
        #: Whose class changes, on one rank as on many. Classes that users gave are left alone.
        self._ours = ours if spec.placement.splits or not self.allocation.stays_whole else []
        self._class_at_rest = ShardedParameter if spec.placement.splits else nn.Parameter
        self._guards = len(ours) == len(self.params) and spec.placement.splits  # all parameters?
        self._may_be_written = False  # by a method, since the parameters became whole
        self._versions: list[int] = []
        for param in self._ours:
            param.before_write = self._before_write  # type: ignore[attr-defined]

    @property
    def gathered(self) -> bool:
        """Is the full bucket there, or on its way?"""
        return self.state is not State.AT_REST

    @property
    def staged(self) -> Tensor | None:
        """Memory on the device that is kept to be sent, where that is not the shard itself."""
        return None if self.spec.staged is None else self._sent.joined

    @property
    def is_whole(self) -> bool:
        """Do the parameters show the full bucket?"""
        return self.state is State.READY or self.allocation.stays_whole

    # ---- memory at rest ------------------------------------------------------------------

    def _allocate(self) -> None:
        dtype, numel = self.dtypes.param, self.layout.numel
        with torch.inference_mode(False):
            self.full = self._memory.full(numel, dtype)  # [W * S]
            self._full_views = self.spec.full_views(self.full)
            self._storage = self.full.untyped_storage()
            self._writer = torch.empty(0, dtype=dtype, device=self.full.device)
            self._writer.set_(self._storage, 0, (numel,), (1,))
            self._sent = Sent(self.spec, self.mesh, self.host, self._writer)
        self._nbytes = self._storage.nbytes()
        self.storage_key = storage_key(self.full)  # tells whether a tensor is a view of a parameter
        self._allocate_shard()
        if not self.allocation.lasting:
            self._memory.free(self._storage)

    def _allocate_shard(self) -> None:
        with torch.inference_mode(False):
            self.shard = in_huge_pages(self._new_shard())  # [S]
            self.shard.zero_()  # padding stays zero for life
            self._rest_views = self.spec.rest_views(self.shard)
        self._addresses = addresses_of(self._rest_views)

    def _new_shard(self) -> Tensor:
        """Allocate what this rank holds while sharded: its own memory, or part of a larger one."""
        spec, dtypes = self.spec, self.dtypes
        if spec.in_host:
            return self.host.shard(self.layout.shard_numel, dtypes.stored)
        if self.allocation.aliased:
            return spec.own(self.full)
        if not spec.splits_copies or dtypes.stored is not dtypes.param:
            return self._memory.shard(self.layout.shard_numel, dtypes.stored)
        return self._sent.piece

    def take(self, index: int, whole: Tensor) -> None:
        """Copy this rank's part of a whole parameter into the shard."""
        self._rest_views[index].copy_(self.part(index, whole))

    def part(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of parameter ``index``, or of its gradient, in a ``whole`` one."""
        return self.sharding(index).cut(whole.detach(), self._rest_views[index].shape)

    def sharding(self, index: int) -> Sharding:
        """The place of the elements of parameter ``index``."""
        spec, (shard, replicate) = self.spec, self.mesh
        axes = (replicate, shard) if spec.splits_copies else (shard,)
        placement = "fully_sharded" if spec.placement.splits else "replicated"
        return Sharding(spec.slots[index], self.unit, placement, self.layout, spec.position, axes)

    # ---- gather and free -----------------------------------------------------------------

    def gather(self) -> None:
        """Issue the all-gather; ``ready`` waits for it. A gathered bucket stays as it is."""
        if self.state is not State.AT_REST:
            return
        self.state = State.IN_FLIGHT
        self.adopt()
        if self.allocation.stays_whole or self._is_current:
            return
        self._is_current = self.spec.kept and not self.trainable
        self._memory.refill(self._storage, self._nbytes)
        if not self._sent.is_updated:
            self.update()
        if not self._sent.is_loaded:
            self.load()
        with self._after_loads() as copied:
            self._pending = copied
            if not self._sent.is_filled:
                self.copied += self._sent.fill(self.shard)
            if not self.allocation.whole and self.mesh.shard.size > 1:
                self._pending = self.mesh.shard.all_gather(self._writer, self._label)

    def load(self) -> None:
        """Copy the shard from host memory to the device, where that is needed."""
        if not self._sent.is_loaded:
            self.adopt()
            self._memory.refill(self._storage, self._nbytes)
            self._pending = self._sent.load(self.shard)

    def update(self) -> None:
        """Join the pieces that the copies' optimizers have written to this rank's shard.

        A collective of the ranks that hold copies, and nothing if no optimizer has stepped since.
        """
        if not self._sent.is_updated:
            self.adopt()
            self.load()
            with self._after_loads() as self._pending:
                self.copied += self._sent.update(self.shard)

    def ready(self) -> None:
        """Wait for the gather and let the parameters be views of the full bucket."""
        if self.state is State.AT_REST:
            self.gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.state is State.IN_FLIGHT:
            if self.allocation.stays_whole:
                self._bind(nn.Parameter)
            else:
                with disable_torch_function():
                    self._bind(GatheredParameter, self._full_views)
                    self._versions, self._may_be_written = [*map(get_version, self.params)], False
            self.state = State.READY
        elif self.dtypes.stored is not self.dtypes.param:
            # A change of dtype makes autograd forget the node that adds up a parameter's gradients.
            # So a unit that was kept since its last use must change, too: else the uses of a tied
            # weight would be summed by autograd here and by us there, and strategies would differ.
            values = [*map(Tensor.detach, self.params)] if self.is_written() else self._full_views
            self.rest()
            with disable_torch_function():
                self._bind(GatheredParameter, values)
            self.state = State.READY

    def free(self, still_read: bool = False) -> None:
        """Point the parameters at this rank's shards, and free the full bucket.

        Where a graph ``still_read``s that memory, it stays until the next ``free``.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:  # gathered ahead and never entered: the peers still send
                pending.wait()
        finally:
            if self.state is not State.AT_REST:
                # Of what stays whole, ``adopt`` takes new values.
                self._bind(self._class_at_rest) if self.allocation.stays_whole else self.rest()
                self.state = State.AT_REST  # last: where Ctrl-C comes between, it is done again
            if not (still_read or self.allocation.lasting):
                self._memory.free(self._storage)
            if self.allocation.reloaded:
                self._sent.forget()

    def rest(self) -> None:
        """Point the parameters at this rank's shards. Classes of the user's own stay."""
        if self.state is State.READY:
            self.state = State.IN_FLIGHT
        with disable_torch_function():
            self._bind(self._class_at_rest, self._rest_views)

    def rest_one(self, index: int) -> None:
        """The same for one parameter, which shows it for the first time."""
        param = self.params[index]
        if type(param) in OUR_CLASSES:
            param.__class__ = self._class_at_rest
        with disable_torch_function():
            set_data(param, self._rest_views[index])

    def expire(self) -> None:
        """The shard may be written next, so what was cast from it is no longer its value."""
        self._sent.expire()
        self._is_current = False

    def expect_step(self) -> None:
        """An optimizer may step next; it leaves alone what is frozen and has no gradient."""
        if self._is_current and not self.trainable:
            with disable_torch_function():
                if all(get_grad(param) is None for param in self.params):
                    return
        self.expire()

    def adopt(self) -> None:
        """Take over values that were put in place of a parameter's by ``param.data = ...``.

        A guarded parameter does so itself. Who has read ``param.data`` before keeps the values that
        were there, as of any parameter: where nothing is split, the bucket moves to other memory.
        """
        with disable_torch_function():
            if addresses_of(self.params) == self._addresses and (
                self._guards
                or [p.shape for p in self.params] == [v.shape for v in self._rest_views]
            ):
                return
            for index, (param, view) in enumerate(zip(self.params, self._rest_views, strict=True)):
                if param.shape != view.shape or param.dtype != view.dtype:
                    raise wrong_replacement(self.members[index].name, view, param)
            values = [param.detach() for param in self.params]
            if self.allocation.whole:
                self._allocate() if self.allocation.aliased else self._allocate_shard()
            for param, view, value in zip(self.params, self._rest_views, values, strict=True):
                if value.data_ptr() != view.data_ptr():
                    if (sharding := sharding_of(param)) is not None:
                        sharding.copy_aliases()
                    view.copy_(value)
            self.expire()
            self.rest()

    def bind_whole(self, wholes: list[Tensor]) -> None:
        """Point the parameters at ``wholes``, as plain parameters, until they are sharded again."""
        with disable_torch_function():
            self._bind(nn.Parameter, wholes)

    def _bind(self, kind: type[nn.Parameter], values: list[Tensor] | None = None) -> None:
        """Give our parameters the class ``kind``, and all of them ``values``, if there are any."""
        for param in self._ours:
            param.__class__ = kind
        [*map(set_data, self.params, values or ())]  # half the cost of a loop

    # ---- written while whole -----------------------------------------------------------------

    def is_written(self) -> bool:
        """May a parameter have been written since it became whole?"""
        if self.allocation.stays_whole or self.state is not State.READY:
            return False
        with disable_torch_function():
            if self._may_be_written or [*map(get_version, self.params)] != self._versions:
                return True
        others = len(self._ours) < len(self.params)  # classes of the user's own tell nothing
        return others and addresses_of(self.params) != addresses_of(self._full_views)

    def keep_written(self) -> None:
        """Take this rank's part of what was written into the shard, if one rank wrote it."""
        if self.allocation.shared and not self._may_be_written:
            now = zip(self.members, map(get_version, self.params), self._versions, strict=True)
            for name in (member.name for member, version, before in now if version != before):
                raise written_by_all_ranks(name, self.spec.shard.size)
        with torch.no_grad(), disable_torch_function():
            cast = self.shard.to(self.full.device).to(self.dtypes.param)  # as a gather casts it
            shown = self.spec.rest_views(cast)
            for index, (param, full) in enumerate(zip(self.params, self._full_views, strict=True)):
                whole = Tensor.detach(param)
                if (whole.shape, whole.dtype) != (full.shape, full.dtype):
                    raise wrong_replacement(self.members[index].name, full, whole)
                self._take_written(self._rest_views[index], self.part(index, whole), shown[index])
        self.expire()

    def _take_written(self, shard: Tensor, part: Tensor, shown: Tensor) -> None:
        if shown.data_ptr() == shard.data_ptr():
            shard.copy_(part)
        else:  # what nobody wrote to is no new value
            shard.copy_(torch.where(part != shown, part.to(shard.dtype), shard.to(part.device)))

    def _before_write(self) -> None:
        """A parameter may be written next, or kept: this rank needs memory of its own for that."""
        lent = self.allocation.shared or pages.holds(self.full.data_ptr())
        is_whole = self.state is State.READY  # else looked up before its arguments sharded it
        if lent and is_whole and not self._may_be_written:
            if self.is_written():  # by a function, which is an error where every rank did
                self.keep_written()
            with torch.inference_mode(False), disable_torch_function():
                self._bind(type(self._ours[0]), self.spec.full_views(self.full.clone()))
        self._may_be_written = True

    def close(self) -> None:
        """Free all memory at once, since another layout may be made next."""
        for param in self._ours:
            del param.before_write  # type: ignore[attr-defined]
        for param in self.params:
            del param.lend_slot, param.add_rows  # type: ignore[attr-defined]
        self.gradients.drop()
        self.full = self.shard = self._writer = torch.empty(0)
        del self._sent
        self._storage = self.full.untyped_storage()
        self._full_views = self._rest_views = []

    def holds(self, index: int, whole: Tensor) -> bool:
        """Has this rank's part of parameter ``index`` the bits of that in ``whole``?"""
        # Bits, since a NaN is not equal to itself.
        shard, part = self._rest_views[index].reshape(-1), self.part(index, whole).reshape(-1)
        return torch.equal(shard.view(torch.uint8), part.to(shard.device).view(torch.uint8))
