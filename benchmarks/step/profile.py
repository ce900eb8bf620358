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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist

from benchmarks.crew import Crew, Seat
from benchmarks.step.engines import Setup, build
from benchmarks.step.host import UNITS, Chains, sharded, stepper
from benchmarks.step.rounds import batch_of, prepare
from benchmarks.step.table import aligned

__all__ = ["Call", "kind_of", "profile", "profile_host"]

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
    """Lines of text: milliseconds by kind of work, then the most expensive calls."""
    with Crew(world, _observe, engine, Setup(model), steps) as crew:
        seen: Seen = crew.hear()[0]
    head = (
        f"{engine} on {model}, {world} ranks, {steps} steps: {seen.plain * 1e3:.1f} ms a step, "
        f"{seen.profiled * 1e3:.1f} ms under the profiler, {seen.faults:,.0f} page faults a step"
    )
    return [head, *_tables(seen.calls, "ms", 1e3 / steps)]


def profile_host(engine: str, params: int, steps: int) -> list[str]:
    """The same of the host alone: microseconds per unit at fake world 8, the model included."""
    with Crew(1, _observe_host, engine, params, steps) as crew:
        seen: Seen = crew.hear()[0]
    head = (
        f"{engine}, {params} parameters a unit, fake world 8, {steps} steps: "
        f"{seen.plain * 1e6 / UNITS:.0f} µs per unit and step, "
        f"{seen.profiled * 1e6 / UNITS:.0f} under the profiler, the model's own included"
    )
    return [head, *_tables(seen.calls, "µs", 1e6 / (steps * UNITS))]


def _tables(calls: Sequence[Call], unit: str, scale: float) -> list[str]:
    """By kind of work, then the most expensive calls; counts are per step or unit, as times are."""
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        kinds[kind_of(call)].append(call)
    seconds = {kind: sum(call.seconds for call in each) for kind, each in kinds.items()}
    count = {kind: sum(call.count for call in each) for kind, each in kinds.items()}
    whole, often = sum(seconds.values()), scale / (1e6 if unit == "µs" else 1e3)
    table = [
        (kind, f"{own * scale:.2f}", f"{own / whole:.1%}", f"{count[kind] * often:.1f}")
        for kind, own in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    worst = sorted(calls, key=lambda call: -call.seconds)[:MOST]
    listed = [
        (c.name, f"{c.seconds * scale:.2f}", f"{c.count * often:.1f}", kind_of(c), c.caller)
        for c in worst
    ]
    return [
        "",
        *aligned([("kind of work", unit, "share", "calls"), *table]),
        "",
        *aligned([("own time of", unit, "calls", "kind", "called from"), *listed]),
    ]


def _observe(seat: Seat, engine: str, setup: Setup, steps: int) -> None:
    with seat.group():
        prepare([engine])
        built = build(engine, setup)
        batches = iter([batch_of(setup, seat.rank, n) for n in range(WARM_UP + 2 * steps)])
        batch = batch_of(setup, seat.rank, 0)

        def step() -> None:
            built.compute(batch)
            built.update()

        def ready() -> None:
            nonlocal batch
            batch = next(batches)
            dist.barrier()

        seat.tell(_seen(step, steps, ready))
        dist.barrier()


def _observe_host(seat: Seat, engine: str, params: int, steps: int) -> None:
    seat.tell(_seen(stepper(sharded(engine, Chains(params))), steps, lambda: None))


def _seen(step: Callable[[], None], steps: int, ready: Callable[[], None]) -> Seen:
    """Take steps without the profiler, then as many with it; ``ready`` before each."""
    profiler = cProfile.Profile()
    laps: list[float] = []
    faults = 0
    for number in range(WARM_UP + 2 * steps):
        ready()
        if number == WARM_UP:
            faults = _faults()
        start = perf_counter()
        if number >= WARM_UP + steps:
            profiler.enable()
        step()
        profiler.disable()
        laps.append(perf_counter() - start)
    plain, profiled = laps[WARM_UP : WARM_UP + steps], laps[WARM_UP + steps :]
    each = (_faults() - faults) / (2 * steps)
    return Seen(median(plain), median(profiled), each, list(_calls_of(pstats.Stats(profiler))))


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
    if builtin and "wait" in call.name:
        return "waiting for peers"
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
# word in the name of what the engine calls → kind
WORDS = {
    "c10d.send": "posting messages",
    "c10d.recv": "posting messages",
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
