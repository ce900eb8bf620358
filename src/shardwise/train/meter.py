"""How fast a run is, and how much memory this process has.

The first steps allocate and record, and validation is no training, so both would make a plain
"tokens so far / seconds so far" wrong for minutes, and a slowdown would not show for hours. So only
the last whole training steps are timed, and the first few of a run are left out once there are
others. What lies between steps, on average, counts for the time that is left.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["Meter", "memory_in_use", "resident_bytes"]

WARM_UP = 3  # steps that do not count
RECENT = 20  # steps that do


class Meter:
    """Times training steps. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # seconds and tokens of each
        self._ended = clock()
        self._between = 0.0  # seconds outside of steps, since the first

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time one step that trains on ``tokens`` tokens (over all ranks)."""
        start = self._clock()
        if self._steps:
            self._between += start - self._ended
        yield
        self._ended = self._clock()
        if self._steps == WARM_UP:
            self._recent.clear()
        self._recent.append((self._ended - start, tokens))
        self._steps += 1

    @property
    def seconds_per_step(self) -> float:
        """The mean of recent steps; the first three do not count as soon as there is a fourth."""
        return sum(seconds for seconds, _ in self._recent) / max(1, len(self._recent))

    @property
    def tokens_per_second(self) -> float:
        """Over the same steps."""
        seconds = sum(seconds for seconds, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0

    def seconds_left(self, steps: int) -> float:
        """How long ``steps`` more will take, with as much between them as there was so far."""
        return steps * (self.seconds_per_step + self._between / max(1, self._steps - 1))


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process has: resident on a CPU, reserved on an accelerator."""
    if device.type == "cpu":
        return resident_bytes()
    return int(torch.get_device_module(device).memory_reserved(device))


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; its peak where the system tells no more."""
    status = Path("/proc/self/status")  # not ru_maxrss: on Linux that starts with the parent's
    if status.exists():
        for line in status.read_text("ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
