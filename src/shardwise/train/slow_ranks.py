"""The rank that the others wait for, and what that costs, from the seconds that each has waited.

Ranks end a step together, so the one that waits least is the slow one. If it were as quick as the
next one, all would save the difference between what these two have waited. On an accelerator the
host does not wait, so nothing is reported there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from shardwise.api.sharded import Sharded

T = TypeVar("T")

FIRST = 5  # steps that are not counted: they allocate, compile and record
STEPS, SECONDS = 20, 10.0  # a report is about as many of both, or more
SHARE = 0.1  # of the time, from which it is reported


def seconds_waited(sharded: Sharded) -> float:
    """The seconds that this rank has waited for collectives, on all its axes."""
    comm, shape = sharded.comm, sharded.shape
    axes = comm.axes(*shape) if shape else ()
    return sum(sum(one.counters.seconds_waited.values()) for one in (comm, *axes))


class SlowRanks:
    """Adds up steps. A rank is reported, and again once it costs half as much again.

    Args:
        waited: this rank's ``seconds_waited`` so far.
        clock: returns seconds.
    """

    def __init__(
        self, waited: Callable[[], float], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._waited, self._clock = waited, clock
        self._start = 0.0, 0.0  # of a step: the clock, and what was waited
        self.last = 0.0  # seconds waited in the step before this one
        self._steps, self._seconds, self._sums = -FIRST, 0.0, list[float]()
        self._reported: dict[int, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self._start = self._clock(), self._waited()

    def without(self, act: Callable[[], T]) -> T:
        """Do what waits for others than these ranks, which is no rank's fault."""
        before = self._clock(), self._waited()
        result = act()
        clock, waited = self._start
        self._start = clock + self._clock() - before[0], waited + self._waited() - before[1]
        return result

    def end(self, last: Sequence[float]) -> str:
        """A step ends; returns the report that is due, or ``""``.

        Args:
            last: each rank's, exchanged in this step.
        """
        text = ""
        if self._steps > 0:
            self._sums = [a + b for a, b in zip(self._sums or [0.0] * len(last), last, strict=True)]
            if self._steps >= STEPS and self._seconds >= SECONDS:
                text = self._report()
                self._steps, self._seconds, self._sums = 0, 0.0, []
        clock, waited = self._clock(), self._waited()
        self.last = waited - self._start[1]
        self._steps += 1
        self._seconds += (clock - self._start[0]) * (self._steps > 0)
        return text

    def _report(self) -> str:
        least, *others = sorted(self._sums)
        rank = self._sums.index(least)
        share = (others[0] - least) / self._seconds if others else 0.0
        if share < max(SHARE, 1.5 * self._reported.get(rank, 0.0)):
            return ""
        self._reported[rank] = share
        return (
            f"rank {rank} is slow: the others waited {share:.0%} of the last {self._steps} steps "
            f"({self._seconds:.0f} s) for it. Look at what else runs on its host, at its clock and "
            "temperature, and at its data."
        )
