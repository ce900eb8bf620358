"""Peak memory of one engine: proportional set sizes, summed over its ranks, seen from outside.

An engine's ranks are processes of their own, because memory that one engine leaves in a heap would
be another's peak. The kernel's own high-water mark of resident pages (each shared page counted in
full) is there to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness.memory import held_by, proc_number, samples, trim
from benchmarks.harness.workers import Worker, Workers
from benchmarks.step.engines import Setup, build
from benchmarks.step.measure import batch_of, prepare


@dataclass(frozen=True)
class Memory:
    """Bytes, summed over ranks."""

    start: int  # proportional set size before the model is built: Python, torch and the group
    peak: int  # the largest while training
    resident: int  # the sum of the kernel's high-water marks of resident memory while training
    samples: int  # how many were taken


def peak_memory(name: str, setup: Setup, world: int, steps: int) -> Memory:
    """Train ``steps`` steps of one engine in new processes and watch them."""
    with Workers(world, _train, name, setup, steps) as workers:
        workers.receive()  # the group exists, the model does not
        start = sum(held_by(pid, "Pss:") for pid in workers.pids)
        workers.receive()  # two steps are done: nothing is set up any more
        totals = [sum(each) for each in samples(workers, "Pss:")]
        return Memory(start, max(totals, default=0), sum(workers.receive()), len(totals))


def _train(worker: Worker, name: str, setup: Setup, steps: int) -> None:
    with worker.group():
        prepare([name])
        batches = [batch_of(setup, worker.rank, step) for step in range(2 + steps)]
        worker.send("started")
        dist.barrier()
        engine = build(name, setup)
        for number, batch in enumerate(batches):
            if number == 2:
                trim()
                Path("/proc/self/clear_refs").write_text("5", "utf-8")  # a new high-water mark
                dist.barrier()
                worker.send("trains")
            engine.compute(batch)
            engine.update()
        worker.send(1024 * proc_number("/proc/self/status", "VmHWM:"))
        dist.barrier()
