"""Python's collector of garbage, which some work cannot have beside it, or is quicker without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_lock = RLock()
_collected: list[bool] = []  # for each block under way, whether garbage was collected before it


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected in this block; several threads may be in one at once."""
    # What is let go of in between may close a comm, which waits for a thread: no lock is held.
    with _lock:
        _collected.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _collected.pop() and not _collected:
                gc.enable()
