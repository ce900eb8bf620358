"""What several tests of checkpoints need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shardwise.checkpoint import checked_file, disk, failpoints


@pytest.fixture(autouse=True)
def _no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is tried as often as elsewhere, without the 1.4 seconds in between."""
    for module in (disk, checked_file):
        monkeypatch.setattr(module, "NAPS", (0.0,) * len(disk.NAPS))


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[str, int], None]], None]]:
    """Listen to the points of a save until the test is over."""
    before = list(failpoints.listeners)
    yield failpoints.listeners.append
    failpoints.listeners[:] = before


@pytest.fixture
def reached(listen: Callable[[Callable[[str, int], None]], None]) -> list[tuple[str, int]]:
    """The points that a save came to, with the rank."""
    points: list[tuple[str, int]] = []
    listen(lambda point, rank: points.append((point, rank)))
    return points
