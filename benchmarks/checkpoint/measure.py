"""What each rank does: interleaved rounds in which every method saves and loads, and one watched.

After every load each rank compares every bit with what was there when saving began. Training goes
on while an asynchronous method saves, so its checkpoint must have the state of before.
"""

from __future__ import annotations

import gc
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from benchmarks.checkpoint.methods import (
    METHODS,
    Method,
    engine_of,
    is_async,
    method_of,
    synchronous,
    trained_model,
)
from benchmarks.checkpoint.trained import Bits, Size, TrainedModel
from benchmarks.harness.memory import held_by, proc_number, samples, trim
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.workers import Worker, Workers
from benchmarks.training import Batch

STEPS = 2  # that are taken while a method saves, and before, alone
COUNTED = ("Pss_Anon:", "Pss_Shmem:")  # pages of files the kernel may drop


@dataclass(frozen=True)
class Lap:
    """Seconds and bytes of one method on one rank in one round."""

    stall: float  # until training may go on
    save: float  # until all is durable; with the steps that are taken meanwhile
    load: float | None  # its files are in memory; ``None`` where nothing loads them
    nbytes: int  # of the files
    cold: float | None = None  # they are not in memory; ``None`` where they always are
    from_disk: int = 0  # bytes that the cold load fetched from the disk
    alone: float = 0.0  # ``STEPS`` steps with nothing under way; 0 where a method is not async
    meanwhile: float = 0.0  # as many steps right after ``save`` returned


@dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    bucket: int  # bytes of our largest unit
    laps: dict[str, list[Lap]]  # method → one for each round


def measure(worker: Worker, size: Size, place: str, rounds: int) -> None:
    """What each rank runs, in a folder. Sends a ``Measured``."""
    with worker.group():
        models = {name: trained_model(name, size) for name in ("ours", "dcp")}
        bits = {name: trained.copy() for name, trained in models.items()}
        methods = {name: method_of(name, models[engine_of(name)]) for name in METHODS}

        def lap(name: str, _: int) -> Lap:
            gc.collect()
            return _lap(methods[name], Path(place) / "step-1", bits[engine_of(name)], size)

        for name in METHODS:
            lap(name, 0)  # imports and allocates for all
        laps = interleaved([*METHODS], rounds, lap)
        worker.send(Measured(models["ours"].bucket, laps))


def _lap(method: Method, folder: Path, bits: Bits, size: Size) -> Lap:
    trained, batch = method.trained, size.batch(dist.get_rank())
    alone = 0.0
    if is_async(method.name):
        dist.barrier()
        alone = _steps(trained, batch)
        trained.put(bits)
    steps = trained.steps
    stall, meanwhile, save = _save(method, folder, batch)
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    load = _load(method, folder, bits, steps)
    cold, fetched = _cold(method, folder, bits, steps)
    remove_together(folder)
    return Lap(stall, save, load, nbytes, cold, fetched, alone, meanwhile)


def _steps(trained: TrainedModel, batch: Batch) -> float:
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
    meanwhile = _steps(method.trained, batch) if is_async(method.name) else 0.0
    if wait is not None:
        wait()
    return stall, meanwhile, perf_counter() - start


def _load(method: Method, folder: Path, bits: Bits, steps: set[float]) -> float | None:
    if method.load is None:
        return None
    method.trained.renew()
    dist.barrier()
    start = perf_counter()
    method.load(folder)
    seconds = perf_counter() - start
    method.trained.check(bits, steps, method.name)
    return seconds


def _cold(method: Method, folder: Path, bits: Bits, steps: set[float]) -> tuple[float | None, int]:
    """The same with the files' bytes on the disk only."""
    if method.load is None or is_async(method.name) or kind_of(folder) == "tmpfs":
        return None, 0
    method.trained.renew()  # what somebody has mapped cannot be forgotten
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        forget(folder)
    dist.barrier()
    before = proc_number("/proc/self/io", "read_bytes:")
    seconds = _load(method, folder, bits, steps)
    return seconds, proc_number("/proc/self/io", "read_bytes:") - before


def kind_of(folder: Path) -> str:
    """Its file system, as the kernel calls it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    over = [(at, kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    return max(over, key=lambda mount: len(mount[0]))[1]


def forget(folder: Path) -> None:
    """Let the kernel drop what it keeps of the files' bytes; memory file systems keep them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file)  # bytes that are not on the disk cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove_together(folder: Path) -> None:
    """Remove a checkpoint with which every rank is done, and the link to it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        (folder.parent / "latest").unlink(missing_ok=True)
    dist.barrier()


# ---- memory --------------------------------------------------------------------------------


def extra_memory(name: str, size: Size, world: int, folder: Path) -> dict[str, int]:
    """``{"save": …, "load": …}``: bytes beyond the state, the most that any rank held.

    Seen from outside, in processes of their own. The base is what a rank has right before, after
    one save and load to warm up, with freed memory given back; for a load, which makes the
    optimizer's moments, the base has their bytes, too. An asynchronous method only saves.
    """
    phases = ["save"] if is_async(name) or name == "plain" else ["save", "load"]
    with Workers(world, _hold, name, size, str(folder)) as workers:
        return {phase: _most(workers) for phase in phases}


def _most(workers: Workers) -> int:
    bases = workers.receive()
    beyond: list[int] = [
        max(held - base for held, base in zip(each, bases, strict=True))
        for each in samples(workers, *COUNTED)
    ]
    workers.receive()  # it is over
    return max(0, *beyond)


def _hold(worker: Worker, name: str, size: Size, place: str) -> None:
    with worker.group():
        folder, trained = Path(place) / "step-1", trained_model(name, size)
        first = method_of(synchronous(name), trained)  # its memory for later saves is measured
        chosen = method_of(name, trained)
        _save_and_wait(first, folder)
        if first.load is not None:
            trained.renew()
            first.load(folder)
        remove_together(folder)
        _begin(worker)
        _save_and_wait(chosen, folder)
        worker.send("saved")
        if chosen.load is not None and not is_async(name):
            moments = sum(v.nbytes for kind, _, _, v in trained.parts() if kind != "param")
            trained.renew()
            _begin(worker, moments)
            chosen.load(folder)
            worker.send("loaded")
        remove_together(folder)


def _begin(worker: Worker, moments: int = 0) -> None:
    """Give back what is free, send what is left with the ``moments`` to come; start together."""
    gc.collect()
    trim()
    dist.barrier()
    worker.send(held_by("self", *COUNTED) + moments)
    dist.barrier()


def _save_and_wait(method: Method, folder: Path) -> None:
    wait = method.save(folder)
    if wait is not None:
        wait()
    dist.barrier()
