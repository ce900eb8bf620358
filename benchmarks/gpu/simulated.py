"""Simulated collectives that take their time: one device, rank 0 of a large group.

Torch's fake process group answers at once and on the stream that asks, so nothing could overlap.
Here each collective takes as long as a link would need for its bytes, ordered as by
``ProcessGroupNCCL``:

    async_op=True     on the group's own stream, after what the caller's stream holds by now;
                      ``wait`` orders the caller's stream after it and blocks nobody
    async_op=False    on the caller's stream
    both              one after the other: there is one link

Every peer is taken to hold what this rank holds, so values are defined and finite, and they are
written only when the time is up: who reads too early reads what lay there before. The host pays
for a few Python calls instead of NCCL's own, the same for every engine. What is left out: the
multiprocessors that NCCL's kernels occupy, and a second communicator's gain on a real network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Link:
    """How fast bytes reach a rank."""

    bandwidth: float  # bytes per second; 0: no time at all
    latency: float = 0.0  # seconds of each collective, besides its bytes

    def seconds(self, nbytes: int) -> float:
        """That a collective takes in which a rank receives ``nbytes``."""
        return self.latency + nbytes / self.bandwidth if self.bandwidth else 0.0


HOST = Link(350e9, 20e-6)  # about what 8 GPUs of one host reach over NVLink 4
NETWORK = Link(45e9, 100e-6)  # about what 400 Gb/s for each GPU leave


def link_of(world: int, bandwidth: float | None = None) -> Link:
    """Assumed, not measured: one host up to 8 ranks, a network beyond; or of this ``bandwidth``."""
    link = HOST if world <= 8 else NETWORK
    return link if bandwidth is None else Link(bandwidth, link.latency if bandwidth else 0.0)


class SimulatedGroup:
    """A group of ``world`` ranks of which only rank 0 exists. Final."""

    def __init__(self, world: int, device: torch.device, link: Link) -> None:
        self.world = world
        self.calls = 0
        self.nbytes = 0  # received by this rank
        self.seconds = 0.0  # that the link needed for them
        self.link = link
        self._queue = _LinkQueue(device) if device.type == "cuda" else None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, ``torch.distributed``'s collectives on any group are these."""
        calls = {
            "all_gather_single": self.all_gather,
            "all_gather_into_tensor": self.all_gather,
            "reduce_scatter_single": self.reduce_scatter,
            "reduce_scatter_tensor": self.reduce_scatter,
            "all_to_all_single": self.all_to_all,
        }
        here: dict[str, Any] = {name: call for name, call in calls.items() if name in vars(dist)}
        with mock.patch.multiple(dist, **here):
            yield

    def all_gather(
        self, output_tensor: Tensor, input_tensor: Tensor, async_op: bool = False, **_: object
    ) -> Work | None:
        """``[world * n]`` from ``[n]``, which may lie in it, at rank 0's place."""

        def write() -> None:
            pieces = output_tensor.view(self.world, -1)
            mine = input_tensor.view(-1)
            if pieces.data_ptr() != mine.data_ptr():
                pieces[0] = mine
            pieces[1:] = mine

        return self._run(input_tensor.nbytes, write, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's own name for it
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
        **_: object,
    ) -> Work | None:
        """``[n]`` from ``[world * n]``: the sum of ``world`` equal addends, or their mean."""
        factor = 1 if op == dist.ReduceOp.AVG else self.world

        def write() -> None:
            torch.mul(input.view(self.world, -1)[0], factor, out=output.view(-1))

        return self._run(output.nbytes, write, async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's own name for it
        async_op: bool = False,
        **_: object,
    ) -> Work | None:
        """``[world * n]`` from the same: every peer sends what this rank would send to itself."""

        def write() -> None:
            output.view(self.world, -1).copy_(input.view(self.world, -1)[0])

        return self._run(input.nbytes // self.world, write, async_op)

    def _run(self, nbytes: int, write: Callable[[], None], async_op: bool) -> Work | None:
        """``nbytes``: from each peer."""
        received = (self.world - 1) * nbytes
        seconds = self.link.seconds(received)
        self.calls += 1
        self.nbytes += received
        self.seconds += seconds
        with torch.no_grad():
            if self._queue is None:
                write()
                return SimulatedWork(None) if async_op else None
            return self._queue.put(seconds, write, async_op)


class SimulatedWork(Work):
    """A collective in flight. On a GPU ``wait`` orders streams, as NCCL's does. Final.

    What takes part in it is kept until then, as ``ProcessGroupNCCL`` keeps it.
    """

    def __init__(self, event: torch.cuda.Event | None, kept: Callable[[], None] | None = None):
        super().__init__()
        self._event = event
        self._kept = kept

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's own
        """Order the current stream after the collective."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._kept = None
        return True

    def is_completed(self) -> bool:
        """Is it over on the device, too?"""
        return self._event is None or self._event.query()


class _LinkQueue:
    """The link: one collective after the other, each on the stream where NCCL would have it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._cycles = _cycles_per_second(device)
        self._last: torch.cuda.Event | None = None

    def put(self, seconds: float, write: Callable[[], None], async_op: bool) -> Work | None:
        current = torch.cuda.current_stream()
        stream = self._stream if async_op else current
        if async_op:
            stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            if seconds:
                torch.cuda._sleep(round(seconds * self._cycles))  # noqa: SLF001
            write()
            self._last = stream.record_event()
        return SimulatedWork(self._last, write) if async_op else None


def _cycles_per_second(device: torch.device) -> float:
    """Cycles of the clock that ``torch.cuda._sleep`` counts, as fast as it runs now."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 200_000_000  # about a tenth of a second
    for _ in range(2):  # the first wakes the device
        start.record()
        torch.cuda._sleep(cycles)  # noqa: SLF001
        stop.record()
        torch.cuda.synchronize(device)
    return float(cycles / (1e-3 * start.elapsed_time(stop)))


class EchoStore(Store):
    """A store in which every peer says, of what ranks share, what this rank says. Final."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key if key in self._values else _own(key)]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values or _own(key) in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: ARG002 - torch's
        return self._values.setdefault(key, desired.encode())


def _own(key: str) -> str:
    """The key that rank 0 writes where ``texts/12/5`` is rank 5's."""
    kind, _, _ = key.partition("/")
    return f"{key.rpartition('/')[0]}/0" if kind == "texts" else key
