"""What ran beside what, from the profiler's trace.

collectives  ──████████──────████──
computation  █████████████─█──███──      hidden: collectives beside computation
copies       ─────────────██───────      exposed: collectives beside no other kernel
                           idle: ─       idle: nothing runs at all

A kernel knows the call that launched it (``correlation``), and the call of a collective lies, on
its thread, inside a mark: the name that ``simulated`` gave to a stretch of time. Without a device
the innermost operations on the CPU stand for kernels, so that all of this runs anywhere.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import simulated

Event = Mapping[str, Any]
"""One entry of a Chrome trace's ``traceEvents``; ``ts`` and ``dur`` are microseconds."""
Interval = tuple[float, float]
"""Start and stop, in any one unit of time."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
SLEEP = "spin_kernel"  # what torch.cuda._sleep launches
COPYING = re.compile(
    r"Memcpy DtoD|copy_kernel|CatArrayBatchedCopy|split_with_sizes_copy|chunk_cat"
    r"|multi_tensor_apply_kernel<.*Copy|aten::copy_"
)


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
        exposed=(length(collectives) - length(common(collectives, others))) * scale,
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


def length(intervals: Iterable[Interval]) -> float:
    """How long they last together."""
    return sum(stop - start for start, stop in intervals)


# ---- from the profiler's trace --------------------------------------------------------------


def profiled(work: Callable[[], object], device: str) -> list[Event]:
    """The trace of ``work``, which must leave nothing running on the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with profile(activities=activities) as profiler:
        work()
        if device != "cpu":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text("utf-8"))["traceEvents"]
    return events


def spans_of(events: Sequence[Event]) -> list[Span]:
    """What ran on the device, in order; on the CPU if there is no device in the trace."""
    marks: dict[Any, list[Interval]] = {}  # thread → when it asked for a collective
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(simulated.MARK):
            marks.setdefault(event["tid"], []).append(_interval(event))
    calls = {e["args"].get("correlation"): e for e in events if e.get("cat") in LAUNCHES}
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    spans = []
    for event in device or _innermost(events):
        call = calls.get(event["args"].get("correlation"), event) if device else event
        marked = any(a <= call["ts"] < b for a, b in marks.get(call.get("tid"), ()))
        spans.append(Span(event["name"], _kind(event["name"], marked=marked), *_interval(event)))
    return sorted(spans, key=lambda span: (span.start, span.stop))


def _kind(name: str, *, marked: bool) -> Kind:
    if marked or SLEEP in name:
        return Kind.COLLECTIVE
    return Kind.COPY if COPYING.search(name) else Kind.COMPUTE


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _innermost(events: Iterable[Event]) -> list[Event]:
    """The operations on the CPU that call no other one: nodes of autograd call hooks, too."""
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    ops.sort(key=lambda op: (op["tid"], op["ts"], -op["dur"]))
    ends = {"tid": None, "ts": 0.0}
    return [
        op
        for op, later in pairwise([*ops, ends])
        if later["tid"] != op["tid"] or later["ts"] >= op["ts"] + op["dur"]
    ]
