"""Ranks of the benchmarks are forked here, from a process that has imported torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.harness import workers
from tests import ranks


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "START", "forkserver")
        ranks.fork_server()
        yield
