"""Where one engine's step spends its time, by kind of work, on rank 0.

Python's profiler sees every call, and so slows Python down but not torch: shares are right
for what torch does and too large for what Python does. Each call into torch is put down to the
file that makes it, because a ``copy_`` means something else in each.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist

from benchmarks.crew import Crew, Seat
from benchmarks.step.engines import Setup, build
from benchmarks.step.rounds import batch_of, prepare
from benchmarks.step.table import aligned

__all__ = ["Call", "kind_of", "profile"]

WARM_UP = 3  # steps
MOST = 30  # calls in the second table

Function = tuple[str, int, str]
"""File, line and name, as ``pstats`` has them; builtins have ``~`` for a file."""


@dataclass(frozen=True)
class Call:
    """One function, called from one file: seconds of its own, and how often, over all steps."""

    name: str
    file: str
    caller: str
    seconds: float
    count: int


@dataclass(frozen=True)
class Seen:
    """What rank 0 saw."""

    plain: float  # seconds of a step without the profiler, median
    profiled: float
    faults: float  # pages per step
    calls: list[Call]


def profile(engine: str, model: str, world: int, steps: int) -> list[str]:
    """Lines of text: time by kind of work, then the most expensive calls."""
    with Crew(world, _observe, engine, Setup(model), steps) as crew:
        seen: Seen = crew.hear()[0]
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in seen.calls:
        kinds[kind_of(call)].append(call)
    whole = sum(call.seconds for call in seen.calls)
    ordered = sorted(kinds.items(), key=lambda item: -_seconds(item[1]))
    table = [
        (kind, _ms(_seconds(calls), steps), f"{_seconds(calls) / whole:.1%}", _calls(calls, steps))
        for kind, calls in ordered
    ]
    worst = sorted(seen.calls, key=lambda call: -call.seconds)[:MOST]
    listed = [
        (c.name, _ms(c.seconds, steps), _calls([c], steps), kind_of(c), c.caller) for c in worst
    ]
    return [
        f"{engine} on {model}, {world} ranks, {steps} steps: {seen.plain * 1e3:.1f} ms a step, "
        f"{seen.profiled * 1e3:.1f} ms under the profiler, {seen.faults:,.0f} page faults a step",
        "",
        *aligned([("kind of work", "ms", "share", "calls"), *table]),
        "",
        *aligned([("own time of", "ms", "calls", "kind", "called from"), *listed]),
    ]


def _seconds(calls: list[Call]) -> float:
    return sum(call.seconds for call in calls)


def _ms(seconds: float, steps: int) -> str:
    return f"{1e3 * seconds / steps:.2f}"


def _calls(calls: list[Call], steps: int) -> str:
    return f"{sum(call.count for call in calls) / steps:.0f}"


def _observe(seat: Seat, engine: str, setup: Setup, steps: int) -> None:
    with seat.group():
        prepare([engine])
        built = build(engine, setup)
        batches = [batch_of(setup, seat.rank, step) for step in range(WARM_UP + 2 * steps)]
        profiler = cProfile.Profile()
        laps, faults = [], 0
        for number, batch in enumerate(batches):
            dist.barrier()
            if number == WARM_UP:
                faults = _faults()
            start = perf_counter()
            if number >= WARM_UP + steps:
                profiler.enable()
            built.compute(batch)
            built.update()
            profiler.disable()
            laps.append(perf_counter() - start)
        plain, profiled = laps[WARM_UP : WARM_UP + steps], laps[WARM_UP + steps :]
        each = (_faults() - faults) / (2 * steps)
        calls = list(_calls_of(pstats.Stats(profiler)))
        seat.tell(Seen(median(plain), median(profiled), each, calls))
        dist.barrier()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _calls_of(stats: pstats.Stats) -> Iterator[Call]:
    """One for each pair of a function and the file that calls it."""
    listed: dict[Function, tuple[Any, ...]] = stats.stats  # type: ignore[attr-defined]
    for (file, line, name), (_, count, seconds, _, callers) in listed.items():
        called = name if file == "~" else f"{_short(file)}:{line} {name}"
        by_file: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for (caller, _, _), (_, calls, own, _) in callers.items():
            by_file[_short(caller)].append((calls, own))
        if not callers:
            by_file[""].append((count, seconds))
        for caller, pairs in by_file.items():
            own = sum(seconds for _, seconds in pairs)
            yield Call(called, _short(file), caller, own, sum(calls for calls, _ in pairs))


def _short(file: str) -> str:
    for root in ("site-packages/", "src/"):
        if root in file:
            return file.rpartition(root)[2]
    return file.rpartition("/")[2] if "/" in file else file


def kind_of(call: Call) -> str:
    """Which kind of work a call is."""
    builtin = call.file == "~"
    if builtin and "run_backward" in call.name:
        return "compute: backward"
    if builtin and "'wait'" in call.name:
        return "waiting for peers"
    for part, kind in KINDS.items():
        if part in call.caller and builtin:
            return kind
    where = call.caller if builtin else call.file
    if where.startswith("shardwise/") and not where.startswith("shardwise/train/"):
        if not builtin:
            return "engine: Python"
        return next((kind for word, kind in WORDS.items() if word in call.name), ENGINE)
    if where.startswith(("torch/distributed", "deepspeed/")):
        return "engine: Python" if not builtin else ENGINE
    if "optim" in where:
        return "optimizer"
    return "compute: forward" if builtin else "Python of model and torch"


ENGINE = "engine: other calls into torch"
# file that calls → kind
KINDS = {
    "shardwise/comm/peers.py": "sums",
    "shardwise/comm/process_group.py": "posting messages",
}
# word in the name of what the engine calls → kind
WORDS = {
    "copy_": "engine: copies",
    "_to_copy": "engine: copies",
    "'to'": "engine: copies",
    "'clone'": "engine: copies",
    "resize_": "engine: memory",
    "empty": "engine: memory",
    "zero": "engine: zeroing",
    "div_": "sums",
    "add": "sums",
}
