"""Throughput of a run, and memory of this process.

Throughput is that of the last training steps only: an average over the whole run would be wrong
for minutes, since the first steps allocate and record, and would hide a slowdown for hours. The
first steps are dropped as soon as there are others. Validation and saving are timed apart: the time
that is left counts as many of them as there will be.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwise.comm.machine.accelerators import row

WINDOW = 20  # steps that are averaged


class Throughput:
    """Times training steps.

    Args:
        warmup: first steps that are dropped when there are others.
        clock: returns seconds.
    """

    def __init__(self, warmup: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self._warmup, self._clock = warmup, clock
        self._all = (0.0, 0)  # seconds and tokens of all steps that count
        self._seconds = 0.0  # of the step that was timed last
        self.steps = 0  # that were counted
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds and tokens of each
        self._between: dict[str, list[float]] = {}  # seconds of each validation, of each save

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; ``count`` it when its tokens are known."""
        start = self._clock()
        yield
        self._seconds = self._clock() - start

    def count(self, tokens: int) -> None:
        """Count the step that was timed; ``tokens`` are of all ranks, which know them later."""
        if self.steps == self._warmup:
            self._recent.clear()
            self._all = (0.0, 0)
        self._recent.append((self._seconds, tokens))
        self._all = (self._all[0] + self._seconds, self._all[1] + tokens)
        self.steps += 1

    @property
    def seconds_per_step(self) -> float:
        """The mean of recent steps."""
        return sum(seconds for seconds, _ in self._recent) / max(1, len(self._recent))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the same steps."""
        seconds = sum(seconds for seconds, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0

    @property
    def overall(self) -> float:
        """Tokens per second over all steps but the dropped ones."""
        seconds, tokens = self._all
        return tokens / seconds if seconds else 0.0

    @contextmanager
    def between_steps(self, kind: str) -> Iterator[None]:
        """Time what is done between two steps, such as ``validation``."""
        start = self._clock()
        yield
        self._between.setdefault(kind, []).append(self._clock() - start)

    def seconds_left(self, steps: int, between: Mapping[str, int]) -> float | None:
        """Estimate the seconds of ``steps`` more steps and of what lies between them.

        Args:
            between: how often each kind will be done; a kind that has not been done yet is not
                counted.

        Returns:
            ``None`` while only first steps were taken, which say nothing of the others.
        """
        if steps and self.steps <= self._warmup:
            return None
        means = {kind: sum(all_) / len(all_) for kind, all_ in self._between.items()}
        rest = sum(means.get(kind, 0.0) * number for kind, number in between.items())
        return steps * self.seconds_per_step + rest


def memory_in_use(device: torch.device) -> int:
    """Bytes of this process: resident on a CPU, reserved on an accelerator, or else in use."""
    if device.type == "cpu":
        return resident_bytes()
    module, keys = torch.get_device_module(device), row(device).memory_stats
    return int(module.memory_stats(device)[keys[1]] if keys else module.memory_reserved(device))


def resident_bytes() -> int:
    """Resident memory of this process in bytes; its peak where only that is known."""
    status = Path("/proc/self/status")  # not ru_maxrss: on Linux that starts with the parent's
    if status.exists():
        for line in status.read_text("ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
