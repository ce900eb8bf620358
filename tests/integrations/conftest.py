"""One process, and nothing of accelerate's state before or after."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """One process, and nothing of accelerate's state before or after."""
    reset()
    yield monkeypatch
    reset()


def reset() -> None:
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    AcceleratorState._reset_state(reset_partial_state=True)
