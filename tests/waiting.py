"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object], seconds: float = 200, seen: Callable[[], object] | None = None
) -> None:
    """Return once ``condition()`` holds; who waits in vain fails, with what was ``seen``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, seen and seen()
        time.sleep(0.01)
