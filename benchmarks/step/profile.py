"""Where one engine's step spends its time on rank 0, by Python's own profiler.

The profiler sees every call, and so slows Python down but not torch: shares are right for what
torch does and too large for what Python does.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable

from benchmarks.harness.workers import Worker, Workers
from benchmarks.step.engines import Setup, build
from benchmarks.step.host import Chains, sharded, stepper
from benchmarks.step.measure import batch_of, prepare

WARM_UP = 3  # steps
MOST = 40  # functions that are listed


def profile(engine: str, model: str, world: int, steps: int) -> str:
    """The functions with the most time of their own, of all ``steps`` together."""
    with Workers(world, _profile, engine, Setup(model), steps) as workers:
        return str(workers.receive()[0])


def profile_host(engine: str, params: int, steps: int) -> str:
    """The same of a step at fake world 8: the engine's Python and a model of small products."""
    with Workers(1, _profile_host, engine, params, steps) as workers:
        return str(workers.receive()[0])


def _profile(worker: Worker, name: str, setup: Setup, steps: int) -> None:
    with worker.group():
        prepare([name])
        engine, batch = build(name, setup), batch_of(setup, worker.rank, 0)

        def step() -> None:
            engine.compute(batch)
            engine.update()

        worker.send(_profiled(step, steps))


def _profile_host(worker: Worker, engine: str, params: int, steps: int) -> None:
    worker.send(_profiled(stepper(sharded(engine, Chains(params))), steps))


def _profiled(step: Callable[[], None], steps: int) -> str:
    for _ in range(WARM_UP):
        step()
    with cProfile.Profile() as profiler:
        for _ in range(steps):
            step()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
    stats.print_stats(MOST).print_callers(MOST)
    return text.getvalue()
