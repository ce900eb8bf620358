"""Interleaved rounds: every way saves and loads in each, so that all meet the same machine.

Before any clock runs, both trainees must hold the same state, by a digest of all ranks. After
every load each rank compares every bit with what was there when saving began. A way that saves
later trains on meanwhile, so its checkpoint must have the state of before.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from benchmarks.checkpoint.state import Size, digest
from benchmarks.checkpoint.traffic import (
    IN_MEMORY,
    Sent,
    forget,
    from_disk,
    kind_of,
    nbytes_of,
    remove,
    sent,
)
from benchmarks.checkpoint.trainees import Trainee
from benchmarks.checkpoint.ways import WAYS, Way, trainee_of, way
from benchmarks.harness.rounds import rotated
from benchmarks.harness.workers import Worker

Bits = dict[tuple[str, str], Tensor]
Batch = tuple[Tensor, Tensor]


class What(NamedTuple):
    """What a load must bring back on this rank."""

    bits: Bits
    steps: set[float]


STEPS = 2  # that are taken while a way saves later, and before, alone


@dataclass(frozen=True)
class Lap:
    """Seconds of one way on one rank in one round."""

    stall: float  # until training may go on
    save: float  # until all is durable; with the steps that are taken meanwhile
    # of ``STEPS`` steps with nothing under way; 0 where ``save`` does not return early
    alone: float
    meanwhile: float  # of as many steps right after ``save`` returned
    load: float  # its files are in memory
    cold: float | None  # they are not; ``None`` where they always are
    from_disk: int  # bytes that the cold load fetched from the disk
    saving: Sent  # what was sent to save
    loading: Sent  # what was sent to load
    nbytes: int  # of the files


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    digest: str  # of the state that was saved, the same for all ways
    bucket: int  # bytes of our largest unit
    laps: dict[tuple[str, str], list[Lap]]  # (kind of file system, way) → one for each round


@dataclass(frozen=True)
class Task:
    """What a crew is asked for."""

    size: Size  # of the state
    names: tuple[str, ...]  # of ways
    # (kind of file system, a folder on it that is ours). Ways that save later are measured on the
    # first alone.
    targets: tuple[tuple[str, str], ...]
    rounds: int  # that are measured; one more is not

    @property
    def later_on(self) -> str:
        return self.targets[0][0]


def observe(worker: Worker, task: Task) -> None:
    """What a rank of the crew runs. Tells a ``Seen``."""
    with worker.group():
        trainees = {name: trainee_of(name, task.size) for name in _makers(task.names)}
        digests = {name: digest(trainee.parts()) for name, trainee in trainees.items()}
        if len(set(digests.values())) > 1:
            raise RuntimeError(f"the trainees do not hold the same state: {digests}")
        ways = {name: way(name, trainees[_maker(name)]) for name in task.names}
        bits = {name: trainee.copy() for name, trainee in trainees.items()}
        laps: dict[tuple[str, str], list[Lap]] = {}
        gc.disable()  # and collected between rounds: a pause belongs to nobody
        _lap_each(ways, task, bits, task.targets[-1][1])  # imports and allocates for all
        for number in range(task.rounds):
            for kind, place in task.targets:
                names = [name for name in ways if not ways[name].later or kind == task.later_on]
                some = {name: ways[name] for name in rotated(names, number)}
                for name, lap in _lap_each(some, task, bits, place).items():
                    laps.setdefault((kind, name), []).append(lap)
        bucket = max(trainee.bucket for trainee in trainees.values())
        worker.send(Seen(next(iter(digests.values())), bucket, laps))


def _lap_each(
    ways: dict[str, Way], task: Task, bits: dict[str, Bits], place: str
) -> dict[str, Lap]:
    """One lap of each, in this order."""
    laps = {}
    for name, one in ways.items():
        gc.collect()
        laps[name] = _lap(one, Path(place) / "step-1", bits[_maker(name)], task.size)
    return laps


def _maker(name: str) -> str:
    """The way whose trainee this one uses."""
    return "ours" if name.startswith("ours") else "dcp"


def _makers(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_maker(name) for name in names if name in WAYS))


def _lap(way: Way, folder: Path, bits: Bits, size: Size) -> Lap:
    trainee, batch = way.trainee, size.batch(dist.get_rank())
    alone = _steps(trainee, batch) if way.later else 0.0
    if way.later:
        trainee.put(bits)
    what = What(bits, trainee.steps)
    before = sent(trainee.sharded)
    stall, meanwhile, save = _save(way, folder, batch)
    saving = sent(trainee.sharded) - before
    dist.barrier()
    nbytes = nbytes_of(folder)
    before = sent(trainee.sharded)
    load = _load(way, folder, what)
    loading = sent(trainee.sharded) - before
    cold, fetched = _cold(way, folder, what)
    dist.barrier()
    if dist.get_rank() == 0:
        remove(folder)
    dist.barrier()
    return Lap(stall, save, alone, meanwhile, load, cold, fetched, saving, loading, nbytes)


def _steps(trainee: Trainee, batch: Batch) -> float:
    dist.barrier()
    start = perf_counter()
    for _ in range(STEPS):
        trainee.step(batch)
    return perf_counter() - start


def _save(way: Way, folder: Path, batch: Batch) -> tuple[float, float, float]:
    """Stall, the steps meanwhile, and all of it. The clocks of all ranks begin together."""
    if dist.get_rank() == 0:
        os.sync()  # what others left to be written, or removed, is not this way's to wait for
    dist.barrier()
    start = perf_counter()
    wait = way.save(folder)
    stall = perf_counter() - start
    meanwhile = 0.0
    if way.later:
        for _ in range(STEPS):
            way.trainee.step(batch)
        meanwhile = perf_counter() - start - stall
    wait()
    return stall, meanwhile, perf_counter() - start


def _load(way: Way, folder: Path, what: What) -> float:
    way.trainee.renew()
    dist.barrier()
    start = perf_counter()
    way.load(folder)
    seconds = perf_counter() - start
    way.trainee.check(what.bits, what.steps, way.name)
    return seconds


def _cold(way: Way, folder: Path, what: What) -> tuple[float | None, int]:
    """The same with the files' bytes on the disk only."""
    if way.later or kind_of(folder) in IN_MEMORY:
        return None, 0
    way.trainee.renew()  # what somebody has mapped cannot be forgotten
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        forget(folder)
    dist.barrier()
    before = from_disk()
    seconds = _load(way, folder, what)
    return seconds, from_disk() - before
