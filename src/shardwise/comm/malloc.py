"""Calls of the C library about large memory; where a library lacks one, nothing is done."""

from __future__ import annotations

import ctypes
from mmap import PAGESIZE

from torch import Tensor

HUGE, MADV_HUGEPAGE = 1 << 21, 14
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

_libc = ctypes.CDLL(None)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Advise the kernel to back ``tensor`` with pages of 2 MiB; returns ``tensor``.

    For large, long-lived memory. The first write to each page of 4 KiB is a page fault, which
    costs as much as reading and verifying the bytes that a checkpoint loads there.
    """
    madvise = getattr(_libc, "madvise", None)
    if tensor.is_cpu and tensor.nbytes >= HUGE and madvise is not None:
        before = tensor.data_ptr() % PAGESIZE  # it has to start on a page
        start, nbytes = tensor.data_ptr() - before, tensor.nbytes + before
        # A hint: if it is refused, pages are small.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), MADV_HUGEPAGE)
    return tensor


def trim() -> None:
    """Return freed memory to the kernel (glibc only).

    Setup frees whole units between shards that stay allocated. The next unit does not fit in the
    holes, and the process would grow by about the size of its shards.
    """
    malloc_trim = getattr(_libc, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def map_blocks(nbytes: int) -> None:
    """Map each block of ``nbytes`` and more for itself from now on (glibc only).

    What is freed then leaves no hole between blocks that stay, and costs its page faults anew.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, nbytes)
        # Once a threshold is set glibc adapts none: it would return each 128 KiB that end the heap.
        mallopt(M_TRIM_THRESHOLD, 32 << 20)
