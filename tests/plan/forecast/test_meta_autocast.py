"""A model may switch autocast off on the meta device, and not on."""

from __future__ import annotations

import pytest
import torch

from shardwise.plan.forecast.meta_autocast import let_autocast_be_off


def test_on_the_meta_device_autocast_may_be_off_and_not_on() -> None:
    let_autocast_be_off()
    with torch.autocast("meta", enabled=False):
        assert torch.ones(2, 2, device="meta").mm(torch.ones(2, 2, device="meta")).is_meta
    with pytest.raises(RuntimeError), torch.autocast("meta", torch.bfloat16):
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
