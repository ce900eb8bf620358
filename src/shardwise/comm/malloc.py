"""The C library's allocator: freed memory that stays mapped in the process.

On CPU the ordinary way gives what is freed back to the kernel and gets it again, page by page and
zeroed, in the next step: writing to fresh pages costs ten times as much as writing to mapped ones.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_mapped", "trim"]

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
KEPT = 1 << 30  # bytes: freed memory up to this stays mapped in the process
OLDER = 1 << 25  # what an older glibc allows at most
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_mapped() -> bool:
    """Let this process keep up to a gigabyte of what it frees, unless its user chose otherwise.

    Returns:
        Whether the allocator took it: glibc does, others do not know it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in CHOSEN):
        return False
    # In this order: once either is set, glibc adapts neither, so one without the other would harm.
    taken = mallopt(MMAP_THRESHOLD, KEPT) or mallopt(MMAP_THRESHOLD, OLDER)
    return bool(taken and mallopt(TRIM_THRESHOLD, KEPT))


def trim() -> None:
    """Return to the kernel what this process has freed, where the allocator can (glibc).

    Setting up frees whole units between shards that stay. What is kept mapped then has holes in
    which the next unit does not fit, and the process grows by about as much as its shards.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
