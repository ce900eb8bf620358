"""Gathers all parameters and gradients in place for the duration of a context manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ShardUseError
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.sharded_parameter import LocalGradient, put_grad
from shardwise.memory.shard_tensor.use_errors import wrong_replacement
from shardwise.memory.whole import gather_parts, gather_whole
from shardwise.torch_internals import disable_torch_function, get_grad, get_version


@contextmanager
def full_params(buckets: Sequence[Bucket], ranks: Comm, writeback: bool) -> Iterator[None]:
    """Gather every parameter and its gradient inside the block, in the stored dtype."""
    by_bucket = [
        [_Entry(bucket, index, whole) for index, whole in enumerate(gather_whole(bucket))]
        for bucket in buckets
    ]
    entries = list(chain.from_iterable(by_bucket))
    _gather_gradients(by_bucket, ranks)
    for bucket, members in zip(buckets, by_bucket, strict=True):
        bucket.bind_whole([entry.whole for entry in members])
        bucket.gradients.lends = False
    for entry in entries:
        entry.enter()
    try:
        yield
    finally:
        for entry in entries:
            entry.exit()
        for bucket in buckets:
            bucket.rest()
            bucket.gradients.lends = True
        for entry in entries:
            entry.set_grad(entry.shard_grad)
    if writeback:
        for entry in entries:
            entry.write_back()
    elif written := [name for entry in entries for name in entry.written()]:
        others = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
        raise ShardUseError(
            f"{written[0]!r}{others} was written inside full_params(), and the values are lost. "
            "Use full_params(writeback=True) to keep them."
        )


class _Entry:
    """One parameter and its gradient before, during and after the block."""

    def __init__(self, bucket: Bucket, index: int, whole: Tensor) -> None:
        self.bucket, self.index, self.whole = bucket, index, whole
        self.param, self.name = bucket.params[index], bucket.members[index].name
        with disable_torch_function():
            self.shard_grad = get_grad(self.param)  # its shape is the shard's
        # A gradient that is accumulated over micro-batches has the full shape already.
        self.is_local = type(self.shard_grad) is LocalGradient
        self.gradient = self.shard_grad if self.is_local else None

    def set_grad(self, gradient: Tensor | None) -> None:
        with disable_torch_function():
            put_grad(self.param, gradient)

    def enter(self) -> None:
        self.set_grad(self.gradient)
        self._versions = get_version(self.param), _version(self.gradient)

    def exit(self) -> None:
        self.value, self.gradient_after = self.param.detach(), get_grad(self.param)
        versions = get_version(self.param), _version(self.gradient_after)
        is_unchanged = self.gradient_after is self.gradient and (
            self.is_local or versions[1] == self._versions[1]
        )
        self._gradient_is_written = not is_unchanged
        self._is_moved = versions[0] != self._versions[0]

    def written(self) -> list[str]:
        """The names of the parameter and the gradient, if they were written."""
        value = self._is_moved or self.value.data_ptr() != self.whole.data_ptr()
        names = [self.name] if value or not self.bucket.holds(self.index, self.whole) else []
        return names + [f"{self.name}.grad"] * self._gradient_is_written

    def write_back(self) -> None:
        """Copy this rank's part of written values into the shards."""
        if (self.value.shape, self.value.dtype) != (self.whole.shape, self.whole.dtype):
            raise wrong_replacement(self.name, self.whole, self.value)
        self.bucket.take(self.index, self.value)
        if self._gradient_is_written:
            after = self.gradient_after
            if after is not None:
                after = self.bucket.part(self.index, after).to(self.param.device, copy=True)
            self.set_grad(after)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else get_version(tensor)


def _gather_gradients(by_bucket: Sequence[Sequence[_Entry]], ranks: Comm) -> None:
    """Gather the gradients of parameters that have one on any rank. A collective."""
    parts = [[None if e.is_local else e.shard_grad for e in members] for members in by_bucket]
    present_here = [part is not None for part in chain.from_iterable(parts)]
    label = Label("whole", "which gradients there are")
    present = ranks.gather_rows(torch.tensor(present_here, dtype=torch.uint8), label)
    on_any_rank = iter(present.any(0).tolist())
    for members, of_bucket in zip(by_bucket, parts, strict=True):
        with_gradient = [entry for entry in members if next(on_any_rank)]
        if not with_gradient:
            continue
        wholes = gather_parts(members[0].bucket, of_bucket)
        for entry in with_gradient:
            entry.gradient = wholes[entry.index].data  # with a version counter of its own
