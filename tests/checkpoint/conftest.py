"""What several tests of checkpoints need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shardwise.checkpoint import failpoints


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
