"""Where one engine's step spends its time on rank 0, by Python's own profiler.

The profiler sees every call, and so slows Python down but not torch: shares are right for what
torch does and too large for what Python does.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Report
from benchmarks.harness.workers import Worker, on_ranks
from benchmarks.step.engines import ENGINES, Setup
from benchmarks.step.measure import batch_of, prepare, step
from benchmarks.step.models import TASKS

WARM_UP = 3  # steps
MOST = 40  # functions that are listed


@dataclass(frozen=True)
class Config:
    """What is profiled."""

    engine: str = setting("full_shard", "whose step", ENGINES)
    model: str = setting("decoder32", "what is trained", TASKS)
    world: int = setting(2, "ranks", least=1)
    steps: int = setting(10, "that are profiled together", least=1)


def run(config: Config, log: Log) -> Iterator[Report]:
    """The functions of one engine's step with the most time of their own, on rank 0."""
    log(f"{config.model}, {config.world} ranks: {config.engine}")
    setup = Setup(config.model)
    text = on_ranks(config.world, _profile, config.engine, setup, config.steps)[0]
    yield Report(this_machine(), tuple(text.splitlines()))


def _profile(worker: Worker, name: str, setup: Setup, steps: int) -> None:
    with worker.group():
        prepare([name])
        engine, batch = ENGINES[name](setup), batch_of(setup, worker.rank, 0)
        for _ in range(WARM_UP):
            step(engine, batch)
        with cProfile.Profile() as profiler:
            for _ in range(steps):
                step(engine, batch)
        text = io.StringIO()
        stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
        stats.print_stats(MOST).print_callers(MOST)
        worker.send(text.getvalue())
