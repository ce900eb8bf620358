"""From the profiler's trace to spans: what ran on the device, where, when, and what for.

A kernel knows the call that launched it (``correlation``), and that call lies, on its thread,
inside a mark: a name that ``simulated`` or ``copies`` gave to a stretch of time. Without a device
the innermost operations on the CPU stand for kernels, so that all of this runs anywhere.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import copies, simulated
from benchmarks.gpu.timeline import Kind, Span

Event = Mapping[str, Any]
"""One entry of a Chrome trace's ``traceEvents``; ``ts`` and ``dur`` are microseconds."""

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
MARKS = (simulated.MARK, copies.MARK)
SLEEP = "spin_kernel"  # what torch.cuda._sleep launches
UNNAMED = "not named"  # the side of a copy that no mark lies around
COPYING = re.compile(
    r"Memcpy DtoD|copy_kernel|CatArrayBatchedCopy|split_with_sizes_copy|chunk_cat"
    r"|multi_tensor_apply_kernel<.*Copy"
)
NESTED = 16  # marks that may begin inside another one


def profiled(work: Callable[[], object], device: str, memory: bool = False) -> list[Event]:
    """The trace of ``work``, which must leave nothing running on the device."""
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=memory) as profiler:
        work()
        if device != "cpu":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text("utf-8"))["traceEvents"]
    return events


class Place(NamedTuple):
    """A moment on a thread of the host."""

    thread: Any
    time: float


class _Marks:
    """The marks of each thread, to look up which of them a moment lies in."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._threads: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "user_annotation" and name.startswith(MARKS):
                found = (event["ts"], event["ts"] + event["dur"], name)
                self._threads.setdefault(event["tid"], []).append(found)
        for marks in self._threads.values():
            marks.sort()

    def at(self, place: Place) -> str:
        """The innermost mark there, ``""`` if there is none."""
        marks = self._threads.get(place.thread, [])
        last = bisect_right(marks, (place.time, float("inf"), ""))
        begun = reversed(marks[max(0, last - NESTED) : last])
        return next((name for _, stop, name in begun if place.time < stop), "")


def spans_of(events: Sequence[Event]) -> list[Span]:
    """What ran on the device, in order; on the CPU if there is no device in the trace."""
    marks = _Marks(events)
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    begun = _launches(device, events) if device else [(e, [_place(e)]) for e in _innermost(events)]
    spans = [
        _span(event, next((mark for place in places if (mark := marks.at(place))), ""))
        for event, places in begun
    ]
    return sorted(spans, key=lambda span: (span.start, span.stop))


def _place(event: Event) -> Place:
    return Place(event["tid"], event["ts"])


def _launches(device: Iterable[Event], events: Iterable[Event]) -> list[tuple[Event, list[Place]]]:
    """Each with where it was launched: the launching call, and the operation that called it."""
    calls = {e["args"]["correlation"]: e for e in events if _has(e, LAUNCHES, "correlation")}
    ops = {e["args"]["External id"]: e for e in events if _has(e, {"cpu_op"}, "External id")}
    found = []
    for event in device:
        call = calls.get(event.get("args", {}).get("correlation"))
        named = [e["args"].get("External id") for e in (event, call) if e is not None]
        begun = [call, *(ops.get(number) for number in named)]
        found.append((event, [_place(e) for e in begun if e is not None]))
    return found


def _has(event: Event, kinds: Iterable[str], field: str) -> bool:
    return any(event.get("cat") == kind for kind in kinds) and field in event.get("args", {})


def _innermost(events: Iterable[Event]) -> list[Event]:
    """The operations on the CPU that call no other one: nodes of autograd call hooks, too."""
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event["tid"], []).append(event)
    found = []
    for ops in threads.values():
        ops.sort(key=lambda op: (op["ts"], -op["dur"]))
        for op, later in zip(ops, [*ops[1:], None], strict=True):
            if later is None or later["ts"] >= op["ts"] + op["dur"]:
                found.append(op)
    return found


def _span(event: Event, mark: str) -> Span:
    kind, side = _what(str(event["name"]), mark)
    stream = int(event.get("args", {}).get("stream", event["tid"]))
    return Span(event["name"], kind, side, stream, event["ts"], event["ts"] + event["dur"])


def _what(name: str, mark: str) -> tuple[Kind, str]:
    side = mark.removeprefix(copies.MARK) if mark.startswith(copies.MARK) else ""
    if SLEEP in name or mark.startswith(simulated.MARK) or side == copies.COLLECTIVES:
        return Kind.COLLECTIVE, ""
    if side:
        return Kind.COPY, side
    return (Kind.COPY, UNNAMED) if COPYING.search(name) else (Kind.COMPUTE, "")


def allocated_of(events: Iterable[Event], since: str) -> tuple[int, int]:
    """Bytes on the CPU when the mark ``since`` begins, and the most from then on."""
    begin = next(event["ts"] for event in events if event.get("name") == since)
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["ts"])
    totals = [(event["ts"], int(event["args"]["Total Allocated"])) for event in changes]
    before = [total for time, total in totals if time < begin]
    start = before[-1] if before else 0
    return start, max([start, *(total for time, total in totals if time >= begin)])
