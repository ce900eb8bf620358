"""Settings of glibc's allocator, so that freed memory stays mapped in the process.

By default large freed blocks go back to the kernel, and the next step gets them again as zeroed
pages: writing to fresh pages costs ten times as much as writing to mapped ones.

Torch asks for aligned blocks. For each glibc takes a longer piece and cuts off its tail, about 100
bytes, which small objects of the thread take from its cache. When the block is freed, it is too
short for the next request of its size, and another piece is touched: 584 MiB where 64 MiB live at
once. So after such a block the cache is emptied, tails and blocks join again, and it is 135 MiB.
"""

from __future__ import annotations

import ctypes
import os
import threading
from mmap import PAGESIZE

from torch import Tensor

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
KEEP_BYTES = 1 << 30  # bytes: freed memory up to this stays mapped in the process
OLD_GLIBC_MAX = 1 << 25  # the maximum of older versions of glibc
HUGE, MADV_HUGEPAGE = 1 << 21, 14
USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")

LARGE = 1 << 22  # bytes of a block that is worth 0.1 ms of joining
TAILS = range(24, 112, 16)  # bytes of an object in a tail
CACHED = 16  # a thread's cache holds fewer objects of each size

_libc = ctypes.CDLL(None)
_small = ctypes.PyDLL(None)  # for calls that are shorter than to let another thread run
_small.malloc.argtypes, _small.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_small.free.argtypes, _small.free.restype = [ctypes.c_void_p], None
_kept = threading.Event()  # is freed memory kept mapped?


def keep_mapped() -> bool:
    """Keep up to a gigabyte of freed memory mapped, unless the user has set the allocator.

    Returns:
        Whether the allocator accepted it; only glibc does.
    """
    mallopt = getattr(_libc, "mallopt", None)
    tunes = "_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or tunes or any(name in os.environ for name in USER_SETTINGS):
        return False
    # Both or none: once one is set, glibc no longer adapts the other.
    accepted = mallopt(MMAP_THRESHOLD, KEEP_BYTES) or mallopt(MMAP_THRESHOLD, OLD_GLIBC_MAX)
    if accepted and mallopt(TRIM_THRESHOLD, KEEP_BYTES):
        _kept.set()
    return _kept.is_set()


def join_freed(nbytes: int) -> None:
    """Make freed blocks of about ``nbytes`` fit again, where they are large and stay mapped.

    What is freed while the thread's cache is full joins its neighbours.
    """
    if nbytes < LARGE or not _kept.is_set():
        return
    malloc, free = _small.malloc, _small.free
    for size in TAILS:
        cached, others = ([malloc(size) for _ in range(CACHED)] for _ in range(2))
        for piece in (*others, *cached):
            free(piece)


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
