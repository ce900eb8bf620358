"""How fast a run is, and how much memory this process has.

The first steps allocate and record, and validation is no training, so both would make a plain
"tokens so far / seconds so far" wrong for minutes. Only whole training steps are timed, and
the first few are left out once there are others.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["Meter", "memory_in_use", "resident_bytes"]

WARM_UP = 3  # steps that do not count


class Meter:
    """Times training steps. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time one step that trains on ``tokens`` tokens (over all ranks)."""
        start = self._clock()
        yield
        self._seconds.append(self._clock() - start)
        self._tokens.append(tokens)

    @property
    def seconds_per_step(self) -> float:
        """The mean; the first three steps are left out as soon as there is a fourth."""
        counted = self._seconds[WARM_UP:] or self._seconds
        return sum(counted) / max(1, len(counted))

    @property
    def tokens_per_second(self) -> float:
        """Over the same steps."""
        seconds = sum(self._seconds[WARM_UP:] or self._seconds)
        return sum(self._tokens[WARM_UP:] or self._tokens) / seconds if seconds else 0.0


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
