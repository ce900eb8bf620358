"""Interleaved rounds: every method saves and loads in each, so that all meet the same machine.

Before any clock runs, both models must hold the same state, by a digest of all ranks. After
every load each rank compares every bit with what was there when saving began. Training goes
on while an asynchronous method saves, so its checkpoint must have the state of before.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from benchmarks.checkpoint.methods import METHODS, Method, method_of, trained_model
from benchmarks.checkpoint.state import Size, digest
from benchmarks.checkpoint.traffic import (
    IN_MEMORY,
    Sent,
    forget,
    from_disk,
    kind_of,
    nbytes_of,
    remove_together,
    sent,
)
from benchmarks.checkpoint.trained import Bits, TrainedModel
from benchmarks.harness.rounds import rotated
from benchmarks.harness.workers import Worker
from benchmarks.training import Batch

STEPS = 2  # that are taken while a method saves, and before, alone


@dataclass(frozen=True)
class Lap:
    """Seconds of one method on one rank in one round."""

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
class Measured:
    """What one rank measured."""

    digest: str  # of the state that was saved, the same for all methods
    bucket: int  # bytes of our largest unit
    laps: dict[tuple[str, str], list[Lap]]  # (kind of file system, method) → one for each round


@dataclass(frozen=True)
class Task:
    """What the ranks are asked for."""

    size: Size  # of the state
    # (kind of file system, a folder on it that is ours); asynchronous methods use the first alone
    targets: tuple[tuple[str, str], ...]
    rounds: int  # that are measured; one more is not


def measure(worker: Worker, task: Task) -> None:
    """What each rank runs. Sends a ``Measured``."""
    with worker.group():
        models = {name: trained_model(name, task.size) for name in ("ours", "dcp")}
        digests = {name: digest(trained.parts()) for name, trained in models.items()}
        if len(set(digests.values())) > 1:
            raise RuntimeError(f"the models do not hold the same state: {digests}")
        bits = {name: trained.copy() for name, trained in models.items()}
        methods = {name: method_of(name, models[_model_of(name)]) for name in METHODS}

        def lap(name: str, place: str) -> Lap:
            gc.collect()
            return _lap(methods[name], Path(place) / "step-1", bits[_model_of(name)], task.size)

        gc.disable()  # and collected between laps: a pause belongs to nobody
        for name in methods:
            lap(name, task.targets[-1][1])  # imports and allocates for all
        laps: dict[tuple[str, str], list[Lap]] = {}
        for number, (kind, place) in product(range(task.rounds), task.targets):
            first = kind == task.targets[0][0]
            names = [name for name, each in methods.items() if first or not each.is_async]
            for name in rotated(names, number):
                laps.setdefault((kind, name), []).append(lap(name, place))
        bucket = max(trained.bucket for trained in models.values())
        worker.send(Measured(digests["ours"], bucket, laps))


def _model_of(method: str) -> str:
    return "ours" if method.startswith("ours") else "dcp"


def _lap(method: Method, folder: Path, bits: Bits, size: Size) -> Lap:
    trained, batch = method.trained, size.batch(dist.get_rank())
    alone = _steps(trained, batch) if method.is_async else 0.0
    if method.is_async:
        trained.put(bits)
    steps = trained.steps
    before = sent(trained.sharded)
    stall, meanwhile, save = _save(method, folder, batch)
    saving = sent(trained.sharded) - before
    dist.barrier()
    nbytes = nbytes_of(folder)
    before = sent(trained.sharded)
    load = _load(method, folder, bits, steps)
    loading = sent(trained.sharded) - before
    cold, fetched = _cold(method, folder, bits, steps)
    remove_together(folder)
    return Lap(stall, save, alone, meanwhile, load, cold, fetched, saving, loading, nbytes)


def _steps(trained: TrainedModel, batch: Batch) -> float:
    dist.barrier()
    start = perf_counter()
    for _ in range(STEPS):
        trained.step(batch)
    return perf_counter() - start


def _save(method: Method, folder: Path, batch: Batch) -> tuple[float, float, float]:
    """Stall, the steps meanwhile, and all of it. The clocks of all ranks begin together."""
    if dist.get_rank() == 0:
        os.sync()  # what others left to be written, or removed, is not this method's to wait for
    dist.barrier()
    start = perf_counter()
    wait = method.save(folder)
    stall = perf_counter() - start
    meanwhile = 0.0
    if method.is_async:
        for _ in range(STEPS):
            method.trained.step(batch)
        meanwhile = perf_counter() - start - stall
    wait()
    return stall, meanwhile, perf_counter() - start


def _load(method: Method, folder: Path, bits: Bits, steps: set[float]) -> float:
    method.trained.renew()
    dist.barrier()
    start = perf_counter()
    method.load(folder)
    seconds = perf_counter() - start
    method.trained.check(bits, steps, method.name)
    return seconds


def _cold(method: Method, folder: Path, bits: Bits, steps: set[float]) -> tuple[float | None, int]:
    """The same with the files' bytes on the disk only."""
    if method.is_async or kind_of(folder) in IN_MEMORY:
        return None, 0
    method.trained.renew()  # what somebody has mapped cannot be forgotten
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        forget(folder)
    dist.barrier()
    before = from_disk()
    seconds = _load(method, folder, bits, steps)
    return seconds, from_disk() - before
