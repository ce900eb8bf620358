"""The C library's allocator: freed memory that stays mapped in the process.

On CPU the ordinary way gives what is freed back to the kernel and gets it again, page by page and
zeroed, in the next step: writing to fresh pages costs ten times as much as writing to mapped ones.
"""

from __future__ import annotations

import ctypes
import os

from torch import Tensor

__all__ = ["in_huge_pages", "keep_mapped", "trim"]

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
KEPT = 1 << 30  # bytes: freed memory up to this stays mapped in the process
OLDER = 1 << 25  # what an older glibc allows at most
PAGE, HUGE, MADV_HUGEPAGE = 4096, 1 << 21, 14
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


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


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The same tensor, whose fresh memory comes in pages of 2 MiB where Linux lets us ask for it.

    For large memory that lives long. The first write to each page of 4 KiB costs a fault: as much
    as reading and checking the bytes that a checkpoint puts there.
    """
    if tensor.is_cpu and tensor.nbytes >= HUGE and _madvise is not None:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        stop = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        _madvise(start, stop - start, MADV_HUGEPAGE)  # a hint: where it is refused, pages are small
    return tensor


def trim() -> None:
    """Return to the kernel what this process has freed, where the allocator can (glibc).

    Setting up frees whole units between shards that stay. What is kept mapped then has holes in
    which the next unit does not fit, and the process grows by about as much as its shards.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
