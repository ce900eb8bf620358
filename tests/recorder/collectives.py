"""A vendor's group of which rank 0 is there: every peer has and sends what this rank has and sends.

As NCCL's, each group has a stream of its own, which follows the stream that issues a collective;
``wait`` lets the current stream follow it and blocks nobody. Outputs are poisoned until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from benchmarks.gpu.simulated import EchoStore
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import backend
from shardwise.comm.transports.backend import BackendComm
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.transport import IMMEDIATE, Shutdown
from tests.recorder.clocks import DEVICE, Event, Stream
from tests.recorder.device import Device, Values, later

__all__ = ["LateGroup", "issued", "late_comm"]


class Late(Work):
    """A collective in flight."""

    def __init__(self, device: Device, event: Event, kept: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self._device, self._event = device, event
        self._kept = kept  # until it is waited for, as torch keeps what takes part

    def wait(self, timeout: Any = None) -> bool:
        self._device.current_stream().wait_event(self._event)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(eq=False)
class LateGroup:
    """``size`` ranks."""

    device: Device
    size: int
    name: str  # of the axis

    def __post_init__(self) -> None:
        self.stream = Stream(f"group {self.name}", self.device.is_late, self.device.host)
        self.device.streams.append(self.stream)

    def abort(self) -> None:
        """Nothing is unfinished."""

    def issue(
        self, name: str, out: Tensor, full: Tensor, write: Callable[[Tensor, Tensor], object]
    ) -> Late:
        """``write(out, full)`` when something waits for it."""
        accesses = self.device.accesses
        self.stream.wait_stream(self.device.current_stream())
        stamp = self.stream.stamp(name)
        nbytes = max(out.nbytes, full.nbytes)
        self.device.overlap.issue(name, self.name, nbytes, stamp, self.stream.clock)
        accesses.read(full, self.stream, stamp)
        accesses.write(out, self.stream, stamp)
        sent = list[Tensor]()  # as it is when the stream comes to it
        values = Values(full)
        own = full if full.untyped_storage() is out.untyped_storage() else None
        with torch.no_grad():
            self.stream.give(lambda: sent.append(values().clone()))
            later(self.stream, out, lambda memory: write(memory, sent[0]), own)
        return Late(self.device, self.stream.record_event(), (out, full))

    def gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> Late:
        def write(to: Tensor, sent: Tensor) -> object:
            return to.view(self.size, -1).copy_(sent.view(-1))

        return self.issue("all_gather", output_tensor, input_tensor, write)

    def scatter(self, output: Tensor, input: Tensor, op: Any, **_: Any) -> Late:  # noqa: A002
        factor = 1 if op == dist.ReduceOp.AVG else self.size

        def write(to: Tensor, sent: Tensor) -> object:
            return torch.mul(sent.view(self.size, -1)[0], factor, out=to.view(-1))

        return self.issue("reduce_scatter", output, input, write)

    def all_reduce(self, tensor: Tensor, op: Any) -> Late:
        factor = 1 if op == dist.ReduceOp.AVG else self.size

        def write(to: Tensor, sent: Tensor) -> object:
            return torch.mul(sent, factor, out=to)

        return self.issue("all_reduce", tensor, tensor, write)

    def exchange(self, out: Tensor, full: Tensor, *_: Any, **__: Any) -> Late:
        def write(to: Tensor, sent: Tensor) -> object:
            return to.view(self.size, -1).copy_(sent.view(self.size, -1)[0])

        return self.issue("all_to_all", out, full, write)


def issued(name: str, *args: Any, group: LateGroup, **kwargs: Any) -> Late:
    """A collective of a group, of which nobody sees what it computes."""
    with torch.utils._python_dispatch._disable_current_modes():
        work: Late = getattr(group, name)(*args, **kwargs)
        return work


@contextmanager
def late_comm(device: Device, size: int) -> Iterator[Comm]:
    """Rank 0 of ``size``, over the path of NCCL."""
    group: Any = LateGroup(device, size, "all")

    def axes(replicate: int, shard: int) -> tuple[Comm, Comm]:
        over = (LateGroup(device, replicate, "replicate"), LateGroup(device, shard, "shard"))
        first, second = (comm(one) if one.size > 1 else LocalComm(DEVICE) for one in over)
        return first, second

    def comm(over: Any, shutdown: Shutdown = IMMEDIATE) -> BackendComm:
        return BackendComm(
            over, DEVICE, EchoStore(), has_average=False, timeout=60, shutdown=shutdown
        )

    calls = {
        "get_rank": lambda _: 0,
        "get_world_size": lambda over=None: (over or group).size,
        "get_backend": lambda _: "nccl",
        "new_group": lambda **_: LateGroup(device, size, "all"),
        "destroy_process_group": lambda _=None: None,
        "all_to_all_single": partial(issued, "exchange"),
        "broadcast": lambda data, *_, group, **__: Late(
            device, device.current_stream().record_event()
        ),
    }
    both = backend._Calls(partial(issued, "gather"), partial(issued, "scatter"))
    with ExitStack() as stack:
        for name, call in calls.items():
            stack.enter_context(mock.patch.object(dist, name, call))
        stack.enter_context(mock.patch.object(backend, "_calls", return_value=both))
        yield stack.enter_context(comm(group, Shutdown(open_axes=axes)))
