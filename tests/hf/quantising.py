"""Ranks that are threads quantise one after the other: bitsandbytes' CPU kernel is not for two."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest

ONE_AT_A_TIME = Lock()


@pytest.fixture(name="one_at_a_time")
def quantising_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    quantize = functional.quantize_blockwise

    def locked(*args: Any, **options: Any) -> Any:
        with ONE_AT_A_TIME:
            return quantize(*args, **options)

    monkeypatch.setattr(functional, "quantize_blockwise", locked)
