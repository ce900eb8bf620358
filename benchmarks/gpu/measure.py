"""What one process measures: bursts of steps in turn, or everything that one engine holds alone.

A lap is several steps without a pause between them, so that the host may run ahead as in training;
it begins and ends with an idle device. Engines that share a process take their laps in turn.
Memory, copies and the timeline are looked at in a process that holds no other engine; a step that
the profiler slows down is never timed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Self

import torch
from torch import Tensor
from torch.profiler import record_function

from benchmarks.gpu.copies import COLLECTIVES, SIDES, CopyRecorder
from benchmarks.gpu.engines import ENGINES, Setup, slice_numel, start
from benchmarks.gpu.models import batch_of
from benchmarks.gpu.simulated import SimulatedGroup
from benchmarks.gpu.timeline import Kind, Overlap, Span, overlap_of
from benchmarks.gpu.trace import UNNAMED, allocated_of, profiled, spans_of
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.workers import Worker
from benchmarks.training import Batch, Engine

BURST = 3  # steps in a lap
WARM = 3  # steps before anything is looked at
WATCHED = 2  # steps during which memory, copies and the timeline are looked at
BATCHES = 4  # different ones
BEGIN = "memory is watched from here on"


@dataclass(frozen=True)
class Lap:
    """Seconds per step."""

    whole: float  # from an idle device to an idle device
    device: float | None  # the same by the device's own clock; ``None`` on the CPU
    host: float  # until the host has asked for everything


@dataclass(frozen=True)
class Memory:
    """Bytes on the device, as torch's allocator counts them."""

    rest: int  # between steps: shards, optimizer state, and whatever else is kept
    peak: int  # the most in use during a step
    reserved: int | None  # the most taken from the device; ``None`` on the CPU


@dataclass(frozen=True)
class CopyCount:
    """Copies of one side, per step."""

    # one of ``copies.SIDES``; or ``"not named"``: kernels that look like copies, and that no
    # operation we know of launched.
    side: str
    kernels: float  # on the device
    milliseconds: float  # that they took
    calls: float  # operations
    nbytes: float  # written


@dataclass(frozen=True)
class Alone:
    """What a process measured that held one engine."""

    memory: Memory  # bytes
    copies: tuple[CopyCount, ...]  # by side, of the sides that there are
    overlap: Overlap  # milliseconds
    received: float  # bytes per step, that the link carried


def time_in_turn(worker: Worker, setup: Setup, names: Sequence[str], rounds: int) -> None:
    """Time engines in turn. Sends a dictionary: engine → its laps."""
    with _Stage(setup) as stage:
        engines = {name: ENGINES[name](setup) for name in names}
        for engine in engines.values():
            stage.steps(engine, WARM)
        worker.send(interleaved(names, rounds, lambda name, _: stage.lap(engines[name])))


def measure_alone(worker: Worker, setup: Setup, name: str) -> None:
    """Memory, copies and timeline of one engine. Sends an ``Alone``."""
    with _Stage(setup) as stage:
        if setup.device == "cpu":
            engine, memory = _memory_on_cpu(stage, name)
        else:
            engine = ENGINES[name](setup)
            stage.steps(engine, WARM)
            memory = _memory(stage, engine)
        nbytes = stage.group.nbytes
        overlap = _overlap(stage, engine)
        received = (stage.group.nbytes - nbytes) / (1 + WATCHED)
        worker.send(Alone(memory, _copies(stage, engine), overlap, received))


class _Stage:
    """A process in which engines run: its group and its batches."""

    def __init__(self, setup: Setup) -> None:
        start(setup)
        self.setup = setup
        self.group = SimulatedGroup(setup.world, setup.place, setup.link)
        self._batches = [batch_of(setup.shape, setup.place, seed) for seed in range(BATCHES)]
        self._taken = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.group.installed())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _batch(self) -> Batch:
        self._taken += 1
        return self._batches[self._taken % BATCHES]

    def take(self, engine: Engine, count: int) -> list[Tensor]:
        """Take ``count`` steps without waiting for the device; their losses, 0-dim."""
        losses = []
        for _ in range(count):
            losses.append(engine.compute(self._batch()))
            engine.update()
        return losses

    def steps(self, engine: Engine, count: int) -> None:
        """The same, waiting for the device at the end. Losses must be finite."""
        losses = [loss.item() for loss in self.take(engine, count)]
        if not all(map(isfinite, losses)):
            raise RuntimeError(f"losses {losses}: what is measured would be other work")

    def lap(self, engine: Engine) -> Lap:
        """Several steps, timed together."""
        gc.collect()
        events = self._clock()
        self.settle()
        begin = perf_counter()
        if events is not None:
            events[0].record()
        self.take(engine, BURST)
        asked = perf_counter()
        if events is not None:
            events[1].record()
        self.settle()
        whole = perf_counter() - begin
        device = None if events is None else 1e-3 * events[0].elapsed_time(events[1]) / BURST
        return Lap(whole / BURST, device, (asked - begin) / BURST)

    def _clock(self) -> list[torch.cuda.Event] | None:
        if self.setup.device == "cpu":
            return None
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.setup.device != "cpu":
            torch.cuda.synchronize(self.setup.place)


def _memory(stage: _Stage, engine: Engine) -> Memory:
    stage.settle()
    gc.collect()
    torch.cuda.empty_cache()  # what building left behind is nobody's reserve
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    stage.steps(engine, WATCHED)
    stage.settle()
    return Memory(rest, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def _memory_on_cpu(stage: _Stage, name: str) -> tuple[Engine, Memory]:
    """The profiler counts what was allocated while it was on: so it is on from the beginning."""
    engines: list[Engine] = []

    def work() -> None:
        engines.append(ENGINES[name](stage.setup))
        stage.steps(engines[0], WARM)
        gc.collect()
        with record_function(BEGIN):
            stage.steps(engines[0], WATCHED)

    events = profiled(work, "cpu", memory=True)
    rest, peak = allocated_of(events, BEGIN)
    return engines[0], Memory(rest, peak, None)


def _overlap(stage: _Stage, engine: Engine) -> Overlap:
    """The first profiled step sets the profiler up, and is not counted."""
    profiled(lambda: stage.take(engine, 1), stage.setup.device)
    events = profiled(lambda: stage.take(engine, WATCHED), stage.setup.device)
    return overlap_of(spans_of(events), WATCHED)


def _copies(stage: _Stage, engine: Engine) -> tuple[CopyCount, ...]:
    recorder = CopyRecorder(slice_numel(stage.setup))

    def work() -> None:
        with recorder:
            stage.take(engine, WATCHED)

    return copies_of(spans_of(profiled(work, stage.setup.device)), recorder, WATCHED)


def copies_of(spans: Sequence[Span], recorder: CopyRecorder, steps: int) -> tuple[CopyCount, ...]:
    """Per step and side: kernels and times from the profiler, calls and bytes from the mode."""
    counts = []
    for side in (*SIDES, UNNAMED):
        kernels = [span for span in spans if span.kind is Kind.COPY and span.side == side]
        calls = [copied for copied in recorder.copies if copied.side == side]
        if side == COLLECTIVES or not (kernels or calls):
            continue
        counts.append(
            CopyCount(
                side,
                kernels=len(kernels) / steps,
                milliseconds=1e-3 * sum(span.stop - span.start for span in kernels) / steps,
                calls=len(calls) / steps,
                nbytes=sum(copied.nbytes for copied in calls) / steps,
            )
        )
    return tuple(counts)
