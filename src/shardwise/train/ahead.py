"""Batches a step ahead: on an accelerator, copied there beside the end of the step before.

    compute stream  ── forward, backward ──┬─ clip, update ───────▶ waits ▶ next step
    copy stream                            └─▶ next step's batches ─┘

The host prepares them while the device computes; a step's loss, which it waits for, comes after
that. Their memory is the compute stream's, which uses and frees it. The step ahead is not taken
yet: what is saved and asked meanwhile is as if its rows had not been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.protocol import Completed, Pending
from shardwise.train.batches import Batches, MicroBatch
from shardwise.train.streams import Position, StreamBatches


class StepBatches(NamedTuple):
    """One rank's micro-batches of a step, in host memory and on the device."""

    step: int
    in_host: Sequence[MicroBatch]
    on_device: Sequence[MicroBatch]
    copied: Pending
    positions: Sequence[Position]  # before its rows were taken


class BatchesAhead:
    """The steps of ``source``, of which the next one can be prepared."""

    def __init__(self, source: Batches | StreamBatches, device: torch.device) -> None:
        self._source, self._device, self._host = source, device, HostMemory(device)
        self._next: StepBatches | None = None
        self.tokens = 0  # of this rank in the step that was taken last, with the padding of rows

    def take(self, step: int) -> StepBatches:
        """Step ``step``, counted from 0: what was prepared, if it is that one."""
        batches = self._forget()
        if batches is None or batches.step != step:
            batches = self._read(step)
            batches.copied.wait()
        self.tokens = sum(batch.ids.numel() for batch in batches.in_host)
        return batches

    def prepare(self, step: int) -> None:
        """Read step ``step`` and begin to copy it, if there is one."""
        if not self._source.ended():
            self._next = self._read(step)

    def ended(self) -> bool:
        """Are there too few rows for another step?"""
        return self._next is None and self._source.ended()

    def positions(self) -> Sequence[Position]:
        """Return the positions after the last step that was taken."""
        return self._source.positions() if self._next is None else self._next.positions

    def close(self) -> None:
        """Read no more."""
        self._forget()
        self._source.close()

    def _forget(self) -> StepBatches | None:
        """Return what was prepared; what waits may free its memory."""
        batches, self._next = self._next, None
        if batches is not None:
            batches.copied.wait()
        return batches

    def _read(self, step: int) -> StepBatches:
        positions, batches = self._source.positions(), self._source.step(step)
        if self._device.type == "cpu":
            return StepBatches(step, batches, batches, Completed(), positions)
        on_device = [batch.empty(self._device) for batch in batches]
        with self._host.copying() as copied:
            for out, batch in zip(on_device, batches, strict=True):
                out.copy_(batch)
        return StepBatches(step, batches, on_device, copied, positions)
