"""Memory of processes, read from outside while they work.

The proportional set size counts a page that two processes share half in each, so a sum over ranks
is what the host holds. A sample may miss a short peak.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.workers import Workers

PAUSE = 0.002  # seconds between two samples


def proc_number(path: str, *keys: str) -> int:
    """The sum of the fields of a file in ``/proc`` that begin with ``keys``."""
    lines = Path(path).read_text("utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(keys))


def held_by(pid: int | str, *keys: str) -> int:
    """Bytes that a process holds, by these fields of ``smaps_rollup``, such as ``"Pss:"``."""
    return 1024 * proc_number(f"/proc/{pid}/smaps_rollup", *keys)


def held_at_most() -> int:
    """Bytes that this process has held at most, by the kernel; of shared pages its part, as now."""
    most = 1024 * proc_number("/proc/self/status", "VmHWM:")
    return most - held_by("self", "Rss:") + held_by("self", "Pss:")


def samples(workers: Workers, *keys: str) -> Iterator[list[int]]:
    """What each rank holds, in bytes, again and again until one of them sends something."""
    with suppress(ProcessLookupError, FileNotFoundError):  # they may end meanwhile
        while not workers.has_sent(PAUSE):
            yield [held_by(process.pid or 0, *keys) for process in workers.processes]


def trim() -> None:
    """Give freed memory of this process back to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)
