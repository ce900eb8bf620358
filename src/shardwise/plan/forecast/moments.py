"""The engine's bytes at each moment of a step, to which any micro-batch's activations are added.

A walk through a step takes milliseconds, and the engine's bytes do not depend on rows. So one walk
serves all micro-batches that have the same spans.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.plan.forecast.memory import MemoryForecast
from shardwise.plan.forecast.work import StepWork

Bytes: TypeAlias = NDArray[np.int64]


class EngineMoments(NamedTuple):
    """Bytes without activations, ``[moments]`` each.

    Attributes:
        peaks, in_host: at most on the device, and in host memory.
        spans: how many spans lie before the moment.
        is_span: 1 where the moment is one, else 0.
        inputs: bytes of the batch, which are in ``peaks``.
    """

    peaks: Bytes
    in_host: Bytes
    spans: Bytes
    is_span: Bytes
    inputs: int

    @classmethod
    def of(cls, whole: MemoryForecast, work: StepWork) -> EngineMoments:
        """Take the activations of ``work`` away from the forecast made with it."""
        is_span = np.array([moment.event is None for moment in whole.moments], dtype=np.int64)
        peaks = np.array([moment.peak for moment in whole.moments], dtype=np.int64)
        in_host = np.array([moment.in_host for moment in whole.moments], dtype=np.int64)
        with_work = cls(peaks, in_host, np.cumsum(is_span) - is_span, is_span, work.inputs)
        levels, hosted = with_work._activations(work)
        return with_work._replace(peaks=peaks - levels, in_host=in_host - hosted)

    def most(self, work: StepWork) -> tuple[int, int]:
        """Bytes at most on the device, and in host memory, with the activations of ``work``."""
        levels, hosted = self._activations(work)
        more = work.inputs - self.inputs
        return int((self.peaks + levels).max()) + more, int((self.in_host + hosted).max())

    def _activations(self, work: StepWork) -> tuple[Bytes, Bytes]:
        alive, within, hosted = activations(work)
        after = self.spans + self.is_span
        return alive[self.spans] + within[self.spans] * self.is_span, hosted[after]


def activations(work: StepWork) -> tuple[Bytes, Bytes, Bytes]:
    """Bytes before each span and after the last, at most above that within it, and in the host."""
    every = (*work.forward, *work.backward)
    alive = np.cumsum([0, *(span.grown for span in every)])
    within = np.array([*(span.peak for span in every), 0])
    return alive, within, np.cumsum([0, *(span.in_host for span in every)])
