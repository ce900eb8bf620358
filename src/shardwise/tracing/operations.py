"""Calls of a program beside torch's own operations.

A *primitive* stands for a collective in the stages that only show it: it says what would happen,
and cannot be called. The last stage puts its *implementation* in its place, which does what the
engine does, by the engine's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.comm.reduction import PendingReduction, Reduction
from shardwise.errors import ScheduleError


class Gathering(NamedTuple):
    """An all-gather in flight: ``full``, ``[W * S]``, is complete once ``pending`` was awaited."""

    full: Tensor
    pending: Pending


def part(flat: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """The part of ``flat`` from ``start`` on, in ``shape``; no copy."""
    return flat[start : start + prod(shape)].view(tuple(shape))


def axes_of(comm: Comm, replicate: int, shard: int) -> tuple[Comm, Comm]:
    """The two axes of a grid of these ranks: the copies of a shard, and the shards of a copy."""
    return comm.axes(replicate, shard)


class Primitive:
    """Operation that a program shows where something is sent, awaited or released.

    Args:
        name: as it is printed.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise ScheduleError(
            f"{self.__name__} is a primitive: it says what is done, and does nothing. Run the "
            "programs of the last stage, trace.forward and trace.backward."
        )


#: ``(shard, name)`` → the whole parameter; its backward averages the gradient and cuts it.
synchronize = Primitive("synchronize")
#: ``(own, unit)``, ``[S]`` → in flight ``[W * S]``: the ranks' pieces, one after the other.
all_gather = Primitive("all_gather")
#: ``(in flight)`` → the result of what was begun.
wait = Primitive("wait")
#: ``(numel, dtype, ((start, gradient), …))`` → ``[W * S]``, zeros between the gradients.
gradient_bucket = Primitive("gradient_bucket")
#: ``(full, unit, dtype)``, ``[W * S]`` → in flight ``[S]``: this rank's piece of the ranks' sum.
#: A fourth argument is the dtype of blocks in which it is sent.
reduce_scatter = Primitive("reduce_scatter")
#: The same, ``[S]`` → in flight ``[S]``: all of the sum of two ranks, which send each other all.
all_reduce = Primitive("all_reduce")
#: ``(full)``: release the memory of a gathered bucket.
free = Primitive("free")
#: ``(shard, dtype)``: from host memory to the device.
load = Primitive("load")
#: ``(mean)``: from the device to host memory.
store = Primitive("store")


def all_gather_impl(comm: Comm, own: Tensor, unit: str, verb: str = "gather") -> Gathering:
    """A full bucket of the comm's memory with this rank's piece in it, and the collective."""
    allocate = comm.memory.full if verb == "gather" else comm.memory.gradient
    full = allocate(comm.size * own.numel(), own.dtype)
    full[comm.rank * own.numel() : (comm.rank + 1) * own.numel()] = own.detach()
    return Gathering(full, comm.all_gather(full, Label(verb, unit)))


def wait_impl(_: Comm, pending: Gathering | PendingReduction) -> Tensor:
    """Wait for it; the full bucket, or this rank's piece of the sum."""
    pending.pending.wait()
    return pending.full if isinstance(pending, Gathering) else pending.out


def gradient_bucket_impl(
    comm: Comm, numel: int, dtype: torch.dtype, gradients: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """Memory from which the comm can send, with the gradients copied in."""
    full = comm.memory.gradient(numel, dtype).zero_()
    for start, gradient in gradients:
        part(full, start, gradient.shape).copy_(gradient)
    return full


def reduce_scatter_impl(
    comm: Comm, full: Tensor, unit: str, dtype: torch.dtype, wire: torch.dtype | None = None
) -> PendingReduction:
    """The engine's sum in rank order, not divided."""
    return Reduction(wire or full.dtype, dtype).start(full, comm, Label("reduce", unit))


def all_reduce_impl(
    comm: Comm, full: Tensor, unit: str, dtype: torch.dtype, wire: torch.dtype | None = None
) -> PendingReduction:
    """The same of all elements."""
    how = Reduction(wire or full.dtype, dtype, whole=True)
    return how.start(full, comm, Label("reduce", unit))


def free_impl(comm: Comm, full: Tensor) -> None:
    """Free its memory; what all ranks map goes with its last tensor."""
    if not comm.memory.shared:
        comm.memory.free(full.untyped_storage())


def load_impl(comm: Comm, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the comm's device, complete when it is used."""
    out = comm.memory.shard(shard.numel(), dtype)
    HostMemory(comm.device).load(out, shard).wait()
    return out


def store_impl(comm: Comm, mean: Tensor) -> Tensor:
    """A copy in host memory, complete."""
    host = HostMemory(comm.device)
    stored = host.store(mean)
    host.wait()
    return stored


IMPLEMENTATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    all_gather: all_gather_impl,
    wait: wait_impl,
    gradient_bucket: gradient_bucket_impl,
    reduce_scatter: reduce_scatter_impl,
    all_reduce: all_reduce_impl,
    free: free_impl,
    load: load_impl,
    store: store_impl,
}
"""Each primitive's implementation, whose first argument is the comm."""
