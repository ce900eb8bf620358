"""What runs beside what: arithmetic on intervals of time, and nothing of any profiler.

collectives  ──████████──────████──
computation  █████████████─█──███──      hidden: collectives beside computation
copies       ─────────────██───────      exposed: collectives beside no other kernel
                           idle: ─       idle: nothing runs at all
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

Interval = tuple[float, float]
"""Start and stop, in any one unit of time."""


class Kind(StrEnum):
    """What a piece of work on the device is for."""

    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"  # what stands for one


@dataclass(frozen=True)
class Span:
    """One kernel, copy or fill on the device."""

    name: str  # as the profiler has it
    kind: Kind  # what it is for
    side: str  # of a copy: whose (see ``copies``); ``""`` of anything else
    stream: int  # where it ran
    start: float  # microseconds
    stop: float  # microseconds


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of one step."""

    whole: float  # from the first kernel's start to the last one's end
    collectives: float  # during which a collective is under way
    hidden: float  # of these, beside a kernel that computes
    exposed: float  # of these, beside no other kernel, be it a copy
    idle: float  # during which nothing runs, so that the device waits for the host

    @property
    def share(self) -> float:
        """Of the collectives' time, how much is hidden behind computation; 1 without any."""
        return self.hidden / self.collectives if self.collectives else 1.0


def overlap_of(spans: Sequence[Span], steps: int) -> Overlap:
    """Of ``steps`` steps together, per step.

    Raises:
        ValueError: there are no spans, so nothing was profiled.
    """
    if not spans:
        raise ValueError(
            "the profiler saw no work on the device: was anything run while it was on?"
        )
    collectives = union((s.start, s.stop) for s in spans if s.kind is Kind.COLLECTIVE)
    compute = union((s.start, s.stop) for s in spans if s.kind is Kind.COMPUTE)
    others = union((s.start, s.stop) for s in spans if s.kind is not Kind.COLLECTIVE)
    busy = union([*collectives, *others])
    whole = busy[-1][1] - busy[0][0]
    scale = 1e-3 / steps
    return Overlap(
        whole=whole * scale,
        collectives=length(collectives) * scale,
        hidden=length(common(collectives, compute)) * scale,
        exposed=length(without(collectives, others)) * scale,
        idle=(whole - length(busy)) * scale,
    )


# ---- intervals; each list below is sorted and its intervals do not touch --------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers. They may come in any order, and overlap."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that both cover."""
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            both.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that ``left`` covers and ``right`` does not."""
    edges = [(float("-inf"), float("-inf")), *right, (float("inf"), float("inf"))]
    return common(left, [(stop, start) for (_, stop), (start, _) in pairwise(edges)])


def length(intervals: Iterable[Interval]) -> float:
    """How long they last together."""
    return sum(stop - start for start, stop in intervals)
