"""Autocast on the meta device, where a model that is observed may switch it off.

Modules that compute in float32 switch autocast off on the device of their tensors: adapters of
experts do. torch knows no autocast of the meta device, so it raises where nothing would be done.
"""

from __future__ import annotations

from functools import cache

import torch


@cache  # for good: of threads that observe at once, one would put back what another has put there
def let_autocast_be_off() -> None:
    """``torch.autocast("meta", enabled=False)`` does nothing from now on."""
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
