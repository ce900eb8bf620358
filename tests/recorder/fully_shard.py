"""Torch's FSDP2 on a device that is not there: streams and collectives are the recorder's.

The device is called "cpu", so that torch has kernels for it, and has no memory of a host beside it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.recorder.clocks import Clock, Event, Stream
from tests.recorder.collectives import LateGroup, issued
from tests.recorder.device import Device

__all__ = ["fsdp2_mesh"]


@contextmanager
def fsdp2_mesh(device: Device, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh for ``fully_shard``, of which rank 0 is here."""
    import torch.distributed.fsdp  # noqa: F401 - its modules are patched
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        axes = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        groups = {
            mesh[axis].get_group(): LateGroup(device, mesh[axis].size(), axis) for axis in axes
        }
        for name, call in _collectives(groups).items():
            stack.enter_context(mock.patch.object(dist, name, call))
        handle = _handle(device)
        for name, module in tuple(sys.modules.items()):
            if name.startswith("torch.distributed.fsdp") and "_get_device_handle" in vars(module):
                patch = mock.patch.object(module, "_get_device_handle", return_value=handle)
                stack.enter_context(patch)
        yield mesh


def _collectives(groups: dict[Any, LateGroup]) -> dict[str, Any]:
    """The collectives that it calls, by the names that this torch has."""

    def call(name: str, *args: Any, group: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = issued(name, *args, group=groups[group], **kwargs)
        return work if async_op else work.wait() and None

    calls = {
        "all_gather_single": "gather",
        "all_gather_into_tensor": "gather",
        "reduce_scatter_single": "scatter",
        "reduce_scatter_tensor": "scatter",
        "all_reduce": "all_reduce",
    }
    return {name: partial(call, ours) for name, ours in calls.items() if name in vars(dist)}


def _handle(device: Device) -> Any:
    """A stand-in for ``torch.cuda``."""
    return SimpleNamespace(
        Stream=lambda priority=0: device.new_stream(),
        Event=partial(_NewEvent, device),
        current_stream=device.current_stream,
        stream=lambda stream: stream,
    )


class _NewEvent(Event):
    """A place that is not taken yet."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.compute, Clock(), 0)
        self._device = device

    def record(self, stream: Stream | None = None) -> Event:
        """Take the place that the stream has come to."""
        now = (stream or self._device.current_stream()).record_event()
        self.stream, self.clock, self.position = now.stream, now.clock, now.position
        return self
