"""The memory of this machine, of which a container or a job of SLURM may have a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

OF_PROCESS = Path("/proc/self/cgroup")  # lines "4:memory:/job_1", or "0::/job_1" of version 2
FILES = {  # a group's limit, by whether it is of version 2
    True: ("/sys/fs/cgroup", "memory.max"),
    False: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


def machine_memory(pinned: bool = False) -> int:
    """Bytes of RAM and, but for pinned memory, swap of this machine, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = Path("/proc/meminfo")
    for line in swap.read_text("ascii").splitlines() if swap.exists() and not pinned else []:
        if line.startswith("SwapTotal:"):
            total += int(line.split()[1]) * 1024
    return min([total, *_limits()])


def _limits() -> Iterator[int]:
    """The limits of this process's groups of memory, and of the groups that hold them.

    A container may see its own group at the root, and itself by the path that the host has for it.
    """
    lines = OF_PROCESS.read_text().splitlines() if OF_PROCESS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = FILES[not controllers]
        group = Path(root, path.lstrip("/"))
        for folder in (group, *group.parents):
            limit = folder / name
            if limit.exists() and (text := limit.read_text("ascii").strip()).isdecimal():
                yield int(text)
