"""Host memory beside a device: a second pool, with a stream for the copies in each direction.

    compute stream  ── ... ──▶ computes ────────────────▶ waits ▶ uses what was loaded
    load stream          └───▶ load ─▶ all-gather ───────┘

A copy follows what the compute stream was given before, since memory may have had another use until
then, and nobody waits for it until its result is used. Where the device is the CPU, copies are
complete when they are issued; the memory is a pool of its own there, too, so that what is allocated
and freed is the same. Copies with streams were not run on an accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from shardwise.comm.memory import Memory
from shardwise.comm.protocol import Completed, Pending


class HostMemory(Memory):
    """Host memory beside ``device``, pinned where that is an accelerator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._beside, self._pins = device, device.type != "cpu"
        self.nbytes = 0  # allocated now
        self.copied = {"load": 0, "store": 0}  # bytes from and to the device
        self._busy = set[torch.Stream]()  # with copies that the host has not waited for
        self._storing: list[tuple[Tensor, Pending]] = []  # sources, of copies that may be under way

    @cached_property
    def _loads(self) -> torch.Stream:
        return torch.Stream(self._beside)

    @cached_property
    def _stores(self) -> torch.Stream:
        return torch.Stream(self._beside)

    def load(self, out: Tensor, source: Tensor) -> Pending:
        """Copy ``source``, in host memory, to ``out`` on the device, and cast it there.

        ``source`` must not be written before ``wait``.
        """
        self.copied["load"] += source.nbytes
        with self.copying() as copied:
            if source.dtype is not out.dtype:
                source = source.to(out.device, non_blocking=True)
            out.copy_(source, non_blocking=True)
        return copied

    def store(self, source: Tensor) -> Tensor:
        """Copy ``source``, on the device, to new host memory, which is complete after ``wait``."""
        out = self.gradient(source.numel(), source.dtype)
        self.copied["store"] += source.nbytes
        for _, copied in self._storing:  # one is under way: then its memory can be used again
            copied.wait()
        self._storing.clear()
        with self.copying(stores=True) as copied:
            out.copy_(source, non_blocking=True)
        if self._pins:
            self._storing.append((source, copied))
        return out

    def wait(self) -> None:
        """Wait until all copies are complete: host memory may be read and written then."""
        if self._busy:
            last = self._busy.pop()
            for other in self._busy:
                last.wait_stream(other)
            last.record_event().synchronize()  # HPU's streams have no synchronize()
        self._busy.clear()
        self._storing.clear()

    @contextmanager
    def copying(self, stores: bool = False) -> Iterator[Pending]:
        """Order copies in the block after the current stream's work, and do not wait for them.

        Yields what to wait for, once the block has ended: all of it, also where it raised.
        """
        if not self._pins:
            yield Completed()
            return
        stream = self._stores if stores else self._loads
        self._busy.add(stream)
        stream.wait_stream(torch.accelerator.current_stream(self._beside))
        with stream:
            copied = _Copied(stream)
            try:
                yield copied
            finally:
                copied.event = stream.record_event()

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pins)
        self.nbytes += tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)
        return tensor

    def _freed(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class _Copied:
    """Copies on another stream. Final; see ``Pending``."""

    def __init__(self, stream: torch.Stream) -> None:
        self._device = stream.device
        self.event: torch.Event

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self.event)
