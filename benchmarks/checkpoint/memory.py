"""Peak memory of one way beyond the state itself: seen from outside, in processes of its own.

The parent reads, every 2 ms, what each rank has of anonymous and shared memory: pages that two
processes share count half in each (proportional set size), and those of files not at all, since
the kernel may drop them. The base is what a rank has right before, with freed memory given back
after one save and load to warm up; for a load, which makes the optimizer's moments, the base has
their bytes, too. Each way has its own processes: what one leaves in a heap
would hide another's peak.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpoint.state import Size
from benchmarks.checkpoint.traffic import remove
from benchmarks.checkpoint.ways import Way, synchronous, trainee_of, way
from benchmarks.harness.workers import Worker, Workers

PAUSE = 0.002  # seconds between two samples
COUNTED = ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True)
class Extra:
    """Bytes beyond the base."""

    rank: int  # the most that any rank had
    total: int  # the most that all had together
    samples: int  # how many were taken


def extra_memory(name: str, size: Size, world: int, folder: Path) -> dict[str, Extra]:
    """``{"save": …, "load": …}`` of one way, in new processes; only ``save`` if it is later."""
    with Workers(world, _hold, name, size, str(folder)) as workers:
        phases = ("save",) if name.endswith("_async") else ("save", "load")
        return {phase: _watched(workers) for phase in phases}


def _watched(workers: Workers) -> Extra:
    bases: Sequence[int] = workers.receive()
    most, total, samples = [0] * len(bases), 0, 0
    with suppress(ProcessLookupError, FileNotFoundError):  # they may end while we look
        while not workers.has_sent(PAUSE):
            found = [held(pid) - base for pid, base in zip(workers.pids, bases, strict=True)]
            most = [max(pair) for pair in zip(most, found, strict=True)]
            total, samples = max(total, sum(found)), samples + 1
    workers.receive()  # it is over
    return Extra(max(most), total, samples)


def held(pid: int | str) -> int:
    """Bytes of anonymous and shared memory of a process, shared pages in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(COUNTED))


def _hold(worker: Worker, name: str, size: Size, place: str) -> None:
    with worker.group():
        folder, trainee = Path(place) / "step-1", trainee_of(name, size)
        first = way(synchronous(name), trainee)  # its memory for later saves is measured
        chosen = way(name, trainee)
        _save(first, folder)
        trainee.renew()
        first.load(folder)
        _remove(folder)
        _begin(worker)
        _save(chosen, folder)
        worker.send("saved")
        if not chosen.later:
            moments = sum(p.value.nbytes for p in trainee.parts() if p.kind != "param")
            trainee.renew()
            _begin(worker, moments)
            chosen.load(folder)
            worker.send("loaded")
        _remove(folder)


def _begin(worker: Worker, moments: int = 0) -> None:
    """Give back what is free, say what is left with the ``moments`` to come; start together."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    worker.send(held("self") + moments)
    dist.barrier()


def _save(way: Way, folder: Path) -> None:
    way.save(folder)()
    dist.barrier()


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        remove(folder)
    dist.barrier()
