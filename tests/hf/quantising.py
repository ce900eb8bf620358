"""Ranks that are threads call bitsandbytes' CPU kernels one after the other.

They sometimes compute something else where two threads call them at once, also for plain models.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest

ONE_AT_A_TIME = Lock()


def alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, by one rank at a time."""

    def locked(*args: Any, **options: Any) -> Any:
        with ONE_AT_A_TIME:
            return call(*args, **options)

    return locked


def updating_alone(optimizer: Any) -> Any:
    """Let no two ranks update a parameter at once; what else a step does, they may do together."""
    optimizer.update_step = alone(optimizer.update_step)
    return optimizer


@pytest.fixture(name="one_at_a_time")
def quantising_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    monkeypatch.setattr(functional, "quantize_blockwise", alone(functional.quantize_blockwise))
