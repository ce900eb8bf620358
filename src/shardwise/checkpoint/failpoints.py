"""The moments of a save, by name, for tests that crash a process at one of them.

``listeners`` is empty unless a test or a benchmark adds to it.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "folder made",  # rank 0: the partial folder and its empty files exist
    "snapshot taken",  # every rank, in the background only: training may go on
    "half of the data written",  # every rank
    "data written",  # every rank: its bytes are in the files, not yet synced
    "data synced",  # every rank
    "all parts known",  # rank 0: every rank has finished
    "headers written",  # rank 0: the files can be read
    "small files written",  # rank 0: JSON beside them
    "manifest unfinished",  # rank 0: written under another name
    "manifest written",  # rank 0
    "about to publish",  # rank 0: before the rename
    "published",  # rank 0: after it
    "latest moved",  # rank 0
    "about to remove",  # rank 0: an old checkpoint has another name now
    "removed",  # rank 0
)

listeners: list[Callable[[str, int], None]] = []
"""Each is called with the point and the rank, on the thread that reached the point."""


def hit(point: str, rank: int) -> None:
    """Call all listeners: this rank's save has reached ``point``."""
    for listener in listeners:
        listener(point, rank)
