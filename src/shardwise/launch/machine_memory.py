"""The memory of this machine, of which a container may have a part."""

from __future__ import annotations

import os
from pathlib import Path

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory(pinned: bool = False) -> int:
    """Bytes of RAM and, but for pinned memory, swap of this machine, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = Path("/proc/meminfo")
    for line in swap.read_text("ascii").splitlines() if swap.exists() and not pinned else []:
        if line.startswith("SwapTotal:"):
            total += int(line.split()[1]) * 1024
    existing = (Path(path) for path in LIMITS)
    limits = (path.read_text("ascii").strip() for path in existing if path.exists())
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])
