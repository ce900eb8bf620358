"""Every parameter and every gradient, whole and in place for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ShardUseError
from shardwise.guard import LocalGradient, put_grad
from shardwise.refusals import replaced
from shardwise.torch_internals import disable_torch_function, get_grad, get_version

__all__ = ["full_params"]


@contextmanager
def full_params(buckets: Sequence[Bucket], ranks: Comm, writeback: bool) -> Iterator[None]:
    """Every parameter is whole, in its stored dtype, and its gradient too, for the block.

    Raises:
        ShardUseError: at the end, something was written and ``writeback`` is false.
    """
    wholes = [bucket.whole() for bucket in buckets]
    entries = [
        _Entry(bucket, index, whole)
        for bucket, values in zip(buckets, wholes, strict=True)
        for index, whole in enumerate(values)
    ]
    _gather_gradients(buckets, entries, ranks)
    for bucket, values in zip(buckets, wholes, strict=True):
        bucket.bind_whole(values)
    for entry in entries:
        entry.begin()
    try:
        yield
    finally:
        for entry in entries:
            entry.end()
        for bucket in buckets:
            bucket.rest()
        for entry in entries:
            entry.put(entry.at_rest)
    if writeback:
        for entry in entries:
            entry.take()
    elif written := [name for entry in entries for name in entry.written()]:
        more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
        raise ShardUseError(
            f"{written[0]!r}{more} was written inside full_params(), and what was written is gone. "
            "Use full_params(writeback=True) to keep it."
        )


class _Entry:
    """One parameter: what it and its gradient were before the block, in it and after it."""

    def __init__(self, bucket: Bucket, index: int, whole: Tensor) -> None:
        self.bucket, self.index, self.whole = bucket, index, whole
        self.param, self.name = bucket.params[index], bucket.members[index].name
        with disable_torch_function():
            self.at_rest = get_grad(self.param)  # of the shard, which the whole does not fit
        # What was summed up between two micro-batches is whole already.
        self.is_local = type(self.at_rest) is LocalGradient
        self.gradient = self.at_rest if self.is_local else None

    def put(self, gradient: Tensor | None) -> None:
        with disable_torch_function():
            put_grad(self.param, gradient)

    def begin(self) -> None:
        self.put(self.gradient)
        self._versions = get_version(self.param), _version(self.gradient)

    def end(self) -> None:
        self.value, self.gradient_after = self.param.detach(), get_grad(self.param)
        versions = get_version(self.param), _version(self.gradient_after)
        same = self.gradient_after is self.gradient and (
            self.is_local or versions[1] == self._versions[1]
        )
        self._gradient_is_written = not same
        self._is_moved = versions[0] != self._versions[0]

    def written(self) -> list[str]:
        """What was written, by name."""
        value = self._is_moved or self.value.data_ptr() != self.whole.data_ptr()
        names = [self.name] if value or not self.bucket.holds(self.index, self.whole) else []
        return names + [f"{self.name}.grad"] * self._gradient_is_written

    def take(self) -> None:
        """Keep this rank's part of what was written; a write in place is in ``whole``, too."""
        if (self.value.shape, self.value.dtype) != (self.whole.shape, self.whole.dtype):
            raise replaced(self.name, self.whole, self.value)
        self.bucket.take(self.index, self.value)
        if self._gradient_is_written:
            after = self.gradient_after
            self.put(None if after is None else self.bucket.part(self.index, after).clone())


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else get_version(tensor)


def _gather_gradients(buckets: Sequence[Bucket], entries: Sequence[_Entry], ranks: Comm) -> None:
    """Whole gradients of the parameters that have one on any rank. A collective."""
    shards = [None if entry.is_local else entry.at_rest for entry in entries]
    mine = torch.tensor([shard is not None for shard in shards], dtype=torch.uint8)
    present = ranks.gather_rows(mine, Label("whole", "which gradients there are"))
    anywhere = iter(present.any(0).tolist())
    start = 0
    for bucket in buckets:
        here = entries[start : start + len(bucket.params)]
        start += len(here)
        wanted = [entry for entry in here if next(anywhere)]
        if not wanted:
            continue
        wholes = bucket.whole_of_parts([None if e.is_local else e.at_rest for e in here])
        for entry in wanted:
            entry.gradient = wholes[entry.index].data  # whose version is its own
