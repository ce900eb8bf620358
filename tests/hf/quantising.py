"""Ranks that are threads call bitsandbytes' CPU kernels one after the other.

They sometimes compute something else where two threads call them at once, also for plain models.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest

ONE_AT_A_TIME = Lock()


def updating_alone(optimizer: Any) -> Any:
    """Let no two ranks update a parameter at once; what else a step does, they may do together."""
    update = optimizer.update_step

    def locked(*args: Any) -> None:
        with ONE_AT_A_TIME:
            update(*args)

    optimizer.update_step = locked
    return optimizer


@pytest.fixture(name="one_at_a_time")
def quantising_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    quantize = functional.quantize_blockwise

    def locked(*args: Any, **options: Any) -> Any:
        with ONE_AT_A_TIME:
            return quantize(*args, **options)

    monkeypatch.setattr(functional, "quantize_blockwise", locked)
