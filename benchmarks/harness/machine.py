"""What a number was measured on: without it a time means nothing."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Where and with what a run was made."""

    date: str  # UTC, to the minute
    processor: str  # as ``/proc/cpuinfo`` names it
    cores: int  # that this process may use
    memory: int  # bytes
    load: float  # the load average of the last minute when the run began: other people's work
    kernel: str  # the operating system's name and release
    # of Python and the packages that are compared; ``""`` where one is absent
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items() if number)
        return (
            f"{self.date}, {self.cores} cores of {self.processor}, "
            f"{self.memory / 2**30:.0f} GiB, {self.kernel}, load {self.load:.1f}; {versions}"
        )


def this_machine() -> Machine:
    """Read from the operating system, now."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {"python": platform.python_version()}
    for package in ("shardwise", "torch", "deepspeed"):
        versions[package] = ""
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        processor=next(names, platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=os.getloadavg()[0],
        kernel=f"{platform.system()} {platform.release()}",
        versions=versions,
    )
