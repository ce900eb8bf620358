"""Faults that are planted into the engine one at a time, each with a program that meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from shardwise.comm.host_memory import HostMemory, _Copied
from shardwise.comm.memory import Memory
from shardwise.comm.protocol import Completed
from shardwise.comm.transports.backend import BackendComm
from shardwise.memory.gradients import Gradients
from shardwise.memory.mean import Mean
from shardwise.memory.parameters import Bucket
from tests.recorder.programs import Program

__all__ = ["FAULTS", "Fault"]

Patch = AbstractContextManager[object]


class Fault(NamedTuple):
    """What is wrong, and where it shows."""

    plant: Callable[[], Patch]
    program: Program
    shows: str  # a part of the first fault that is recorded


def before(owner: Any, name: str, change: Callable[[Any], object]) -> Patch:
    """``change(self)`` before each call of a method."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        change(self)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, changed)


def no_wait_for_a_gather() -> Patch:
    return before(Bucket, "ready", lambda bucket: setattr(bucket, "_pending", None))


def _forget(gradients: Any) -> None:
    if gradients.reducing is not None:
        gradients.reducing = gradients.reducing._replace(pending=Completed())


def no_wait_for_a_reduction() -> Patch:
    return before(Gradients, "settle", _forget)


def no_wait_for_the_shards_before_the_copies() -> Patch:
    return before(Gradients, "average", _forget)


def no_wait_for_an_update() -> Patch:
    return before(Bucket, "gather", lambda bucket: setattr(bucket, "_after_loads", nullcontext))


def no_wait_for_the_other_copies() -> Patch:
    return before(Mean, "value", lambda mean: setattr(mean, "_spreading", None))


def freed_while_it_is_gathered() -> Patch:
    return before(Bucket, "free", lambda bucket: setattr(bucket, "_pending", None))


def a_buffer_for_two_reductions() -> Patch:
    kept: dict[Any, Tensor] = {}
    new = Memory.gradient

    def gradient(self: Memory, numel: int, dtype: torch.dtype) -> Tensor:
        key = id(self), numel, dtype
        return kept.setdefault(key, new(self, numel, dtype))

    return mock.patch.object(Memory, "gradient", gradient)


def copies_that_do_not_follow() -> Patch:
    @contextmanager
    def copying(self: Any, stores: bool = False) -> Iterator[object]:
        with self._stores if stores else self._loads as stream:
            copied = _Copied(stream)
            yield copied
            copied.event = stream.record_event()

    return mock.patch.object(HostMemory, "copying", copying)


def no_wait_for_a_load() -> Patch:
    return mock.patch.object(_Copied, "wait", return_value=None)


def no_wait_of_the_host() -> Patch:
    return mock.patch.object(HostMemory, "wait", return_value=None)


def a_gradient_is_dropped_while_it_is_copied() -> Patch:
    return before(HostMemory, "store", lambda host: host._storing.clear())


def refilled_in_another_stream() -> Patch:
    refill = Memory.refill

    def refilled(self: Memory, storage: torch.UntypedStorage, nbytes: int) -> None:
        with torch.Stream(self._device):
            refill(self, storage, nbytes)

    return mock.patch.object(Memory, "refill", refilled)


def a_gather_in_a_stream_of_its_own() -> Patch:
    gather = BackendComm.all_gather

    def gathered(self: BackendComm, *args: Any) -> Any:
        with torch.Stream(self.device):
            return gather(self, *args)

    return mock.patch.object(BackendComm, "all_gather", gathered)


PLAIN = Program()
EVERYTHING = Program(options={"offload": "everything"})
WHOLE = Program("no_shard", {"offload": "everything"})
COPIES = Program("hybrid_shard", {"mesh": (2, 2)})
PIECES = Program("hybrid_full", {"mesh": (2, 2)})

FAULTS = {
    fault.plant.__name__: fault
    for fault in (
        Fault(no_wait_for_a_gather, PLAIN, "has not waited for all_gather"),
        Fault(no_wait_for_a_reduction, PLAIN, "has not waited for reduce_scatter"),
        Fault(no_wait_for_the_shards_before_the_copies, COPIES, "has not waited for reduce"),
        Fault(no_wait_for_an_update, PIECES, "has not waited for all_gather"),
        Fault(no_wait_for_the_other_copies, COPIES, "has not waited for all_gather"),
        Fault(freed_while_it_is_gathered, Program(raises="forward"), "free"),
        Fault(a_buffer_for_two_reductions, PLAIN, "writes"),
        Fault(copies_that_do_not_follow, EVERYTHING, "has not waited for"),
        Fault(no_wait_for_a_load, WHOLE, "has not waited for aten::copy_"),
        Fault(no_wait_of_the_host, EVERYTHING, "has not waited for aten::copy_"),
        Fault(a_gradient_is_dropped_while_it_is_copied, EVERYTHING, "frees"),
        Fault(refilled_in_another_stream, EVERYTHING, "has not waited"),
        Fault(a_gather_in_a_stream_of_its_own, PLAIN, "has not waited"),
    )
}
