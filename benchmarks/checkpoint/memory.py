"""Peak memory of one method beyond the state itself: seen from outside, in processes of its own.

Anonymous and shared memory count, and pages of files do not, since the kernel may drop them. The
base is what a rank has right before, with freed memory given back
after one save and load to warm up; for a load, which makes the optimizer's moments, the base has
their bytes, too.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpoint.methods import Method, method_of, synchronous, trained_model
from benchmarks.checkpoint.state import Size
from benchmarks.checkpoint.traffic import remove_together
from benchmarks.harness.memory import held_by, samples, trim
from benchmarks.harness.workers import Worker, Workers

COUNTED = ("Pss_Anon:", "Pss_Shmem:")


@dataclass(frozen=True)
class Extra:
    """Bytes beyond the base."""

    rank: int  # the most that any rank had
    total: int  # the most that all had together
    samples: int  # how many were taken


def extra_memory(name: str, size: Size, world: int, folder: Path) -> dict[str, Extra]:
    """``{"save": …, "load": …}`` of one method, in new processes; an async one only saves."""
    with Workers(world, _hold, name, size, str(folder)) as workers:
        phases = ("save",) if name.endswith("_async") else ("save", "load")
        return {phase: _watched(workers) for phase in phases}


def _watched(workers: Workers) -> Extra:
    bases = workers.receive()
    beyond = [
        [held - base for held, base in zip(each, bases, strict=True)]
        for each in samples(workers, *COUNTED)
    ]
    workers.receive()  # it is over
    most, total = max(map(max, beyond), default=0), max(map(sum, beyond), default=0)
    return Extra(max(0, most), max(0, total), len(beyond))


def _hold(worker: Worker, name: str, size: Size, place: str) -> None:
    with worker.group():
        folder, trained = Path(place) / "step-1", trained_model(name, size)
        first = method_of(synchronous(name), trained)  # its memory for later saves is measured
        chosen = method_of(name, trained)
        _save(first, folder)
        trained.renew()
        first.load(folder)
        remove_together(folder)
        _begin(worker)
        _save(chosen, folder)
        worker.send("saved")
        if not chosen.is_async:
            moments = sum(p.value.nbytes for p in trained.parts() if p.kind != "param")
            trained.renew()
            _begin(worker, moments)
            chosen.load(folder)
            worker.send("loaded")
        remove_together(folder)


def _begin(worker: Worker, moments: int = 0) -> None:
    """Give back what is free, say what is left with the ``moments`` to come; start together."""
    gc.collect()
    trim()
    dist.barrier()
    worker.send(held_by("self", *COUNTED) + moments)
    dist.barrier()


def _save(method: Method, folder: Path) -> None:
    method.save(folder)()
    dist.barrier()
