"""What one process measures: bursts of steps in turn, or everything that one engine holds alone.

A lap is several steps without a pause between them, so that the host may run ahead as in training;
it begins and ends with an idle device. Engines that share a process take their laps in turn, over
the link and over one that takes no time: what a step takes longer is what communication costs it,
and what collectives take beyond that is hidden behind computation. Memory and copies are looked at
in a process that holds no other engine.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.gpu.copies import CopyRecorder
from benchmarks.gpu.engines import ENGINES, Setup, slice_numel, start
from benchmarks.gpu.simulated import Link, SimulatedGroup
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.workers import Worker
from benchmarks.training import Engine

BURST = 3  # steps in a lap
WARM = 3  # steps before anything is looked at
WATCHED = 2  # steps during which memory and copies are looked at
BATCHES = 4  # different ones


@dataclass(frozen=True)
class Lap:
    """Seconds per step."""

    whole: float  # from an idle device to an idle device
    host: float  # until the host has asked for everything
    link: float  # that its collectives take
    exposed: float  # by which it is longer than over a link that takes no time


@dataclass(frozen=True)
class Memory:
    """Bytes on the device, as torch's allocator counts them."""

    rest: int  # between steps: shards, optimizer state, and whatever else is kept
    peak: int  # the most in use during a step
    reserved: int  # the most taken from the device


@dataclass(frozen=True)
class Alone:
    """What a process measured that held one engine."""

    memory: Memory | None  # ``None`` on the CPU
    copies: dict[str, tuple[float, float]]  # side → copies and bytes per step
    received: float  # bytes per step, that the link carried


def time_in_turn(worker: Worker, setup: Setup, names: Sequence[str], rounds: int) -> None:
    """Time engines in turn. Sends a dictionary: engine → its laps."""
    with _stage(setup) as stage:
        engines = {name: ENGINES[name](setup) for name in names}
        for engine in engines.values():
            stage.steps(engine, WARM)
        worker.send(interleaved(names, rounds, lambda name, _: stage.lap(engines[name])))


def measure_alone(worker: Worker, setup: Setup, name: str) -> None:
    """Memory and copies of one engine. Sends an ``Alone``."""
    with _stage(setup) as stage:
        engine = ENGINES[name](setup)
        stage.steps(engine, WARM)
        memory = None if setup.device == "cpu" else _memory(stage, engine)
        before, recorder = stage.group.nbytes, CopyRecorder(slice_numel(setup))
        with recorder:
            stage.take(engine, WATCHED)
        received = (stage.group.nbytes - before) / WATCHED
        worker.send(Alone(memory, copies_of(recorder, WATCHED), received))


@dataclass
class _Stage:
    """A process in which engines run."""

    setup: Setup
    group: SimulatedGroup
    taken: int = 0  # steps

    def __post_init__(self) -> None:
        self.batches = [self.setup.batch(seed) for seed in range(BATCHES)]

    def take(self, engine: Engine, count: int) -> list[Tensor]:
        """Take ``count`` steps without waiting for the device; their losses, 0-dim."""
        losses = []
        for _ in range(count):
            self.taken += 1
            losses.append(engine.compute(self.batches[self.taken % BATCHES]))
            engine.update()
        return losses

    def steps(self, engine: Engine, count: int) -> None:
        """The same, waiting for the device at the end. Losses must be finite."""
        losses = [loss.item() for loss in self.take(engine, count)]
        if not all(map(isfinite, losses)):
            raise RuntimeError(f"losses {losses}: what is measured would be other work")

    def lap(self, engine: Engine) -> Lap:
        """Several steps, timed together; and as many with the link away."""
        before = self.group.seconds
        whole, host = self._burst(engine)
        if self.setup.device == "cpu":  # where a link takes no time
            return Lap(whole, host, 0.0, 0.0)
        link = (self.group.seconds - before) / BURST
        self.group.link = Link(0)
        free, _ = self._burst(engine)
        self.group.link = self.setup.link
        return Lap(whole, host, link, whole - free)

    def _burst(self, engine: Engine) -> tuple[float, float]:
        """Seconds per step: all of it, and the host's."""
        gc.collect()
        self.settle()
        begin = perf_counter()
        self.take(engine, BURST)
        issued = perf_counter()
        self.settle()
        return (perf_counter() - begin) / BURST, (issued - begin) / BURST

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.setup.device != "cpu":
            torch.cuda.synchronize(self.setup.place)


@contextmanager
def _stage(setup: Setup) -> Iterator[_Stage]:
    start(setup)
    group = SimulatedGroup(setup.world, setup.place, setup.link)
    with group.installed():
        yield _Stage(setup, group)


def _memory(stage: _Stage, engine: Engine) -> Memory:
    stage.settle()
    gc.collect()
    torch.cuda.empty_cache()  # what building left behind is nobody's reserve
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    stage.steps(engine, WATCHED)
    stage.settle()
    return Memory(rest, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def copies_of(recorder: CopyRecorder, steps: int) -> dict[str, tuple[float, float]]:
    """Side → copies and bytes per step."""
    calls = Counter(copied.side for copied in recorder.copies)
    nbytes: Counter[str] = Counter()
    for copied in recorder.copies:
        nbytes[copied.side] += copied.nbytes
    return {side: (calls[side] / steps, nbytes[side] / steps) for side in sorted(calls)}
