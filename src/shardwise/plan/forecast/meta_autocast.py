"""Autocast on the meta device, where a model that is observed may switch it off.

Modules that compute in float32 switch autocast off on the device of their tensors: adapters of
experts do. torch knows no autocast of the meta device, so it raises where nothing would be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autocast_off() -> Iterator[None]:
    """``torch.autocast("meta", enabled=False)`` does nothing inside the block."""
    plain = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        known = "cpu" if device_type == "meta" and not enabled else device_type
        plain(self, known, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = plain  # type: ignore[method-assign]
