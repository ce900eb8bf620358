"""Peak memory of one engine: proportional set sizes, summed over its ranks, seen from outside.

A page that two processes share counts half in each, so that the sum is what the host holds. The
parent reads both while the ranks train; an engine's ranks are processes of their own, because
memory that one engine leaves in a heap would be another's peak. A sample may miss a short peak:
the kernel's own high-water mark of resident pages (each shared page counted in full) is there
to compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.crew import Crew, Seat
from benchmarks.step.engines import Setup, build
from benchmarks.step.rounds import batch_of, prepare

__all__ = ["Memory", "peak_memory"]

PAUSE = 0.002  # seconds between two samples


@dataclass(frozen=True)
class Memory:
    """Bytes, summed over ranks.

    Attributes:
        start: proportional set size before the model is built: Python, torch and the group.
        peak: the largest while training.
        resident: the sum of the kernel's high-water marks of resident memory while training.
        samples: how many were taken.
    """

    start: int
    peak: int
    resident: int
    samples: int


def peak_memory(name: str, setup: Setup, world: int, steps: int) -> Memory:
    """Train ``steps`` steps of one engine in new processes and watch them."""
    with Crew(world, _train, name, setup, steps) as crew:
        crew.hear()  # the group is there, the model is not
        start = proportional(crew.pids)
        crew.hear()  # two steps are done: nothing is set up any more
        peak, samples = 0, 0
        with suppress(ProcessLookupError, FileNotFoundError):  # they may end while we look
            while crew.is_silent(PAUSE):
                peak, samples = max(peak, proportional(crew.pids)), samples + 1
        return Memory(start, peak, sum(crew.hear()), samples)


def proportional(pids: Iterable[int]) -> int:
    """Bytes that these processes hold, shared pages counted in parts."""
    return sum(_kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids) * 1024


def _kilobytes(path: str, key: str) -> int:
    lines = Path(path).read_text("utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def _train(seat: Seat, name: str, setup: Setup, steps: int) -> None:
    with seat.group():
        prepare([name])
        batches = [batch_of(setup, seat.rank, step) for step in range(2 + steps)]
        seat.tell("started")
        dist.barrier()
        engine = build(name, setup)
        for number, batch in enumerate(batches):
            if number == 2:
                _forget_the_past()
                dist.barrier()
                seat.tell("trains")
            engine.compute(batch)
            engine.update()
        seat.tell(_kilobytes("/proc/self/status", "VmHWM:") * 1024)
        dist.barrier()


def _forget_the_past() -> None:
    """Give back what building left in the heap, and begin the high-water mark anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
