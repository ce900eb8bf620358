"""A model that ranks build on the meta device, and the same one made whole with the same seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.comm.protocol import Comm
from shardwise.config.options import default_init
from tests.nets import Net

__all__ = ["built_on_meta", "init_of", "made_whole"]


def built_on_meta(net: Net) -> nn.Module:
    with torch.device("meta"):
        return net.build()


def made_whole(net: Net) -> nn.Module:
    """Whatever ``build`` drew, every value is drawn again, module by module."""
    model = net.build()
    torch.manual_seed(0)
    return model.apply(default_init)


def init_of(comm: Comm) -> dict[str, Any]:
    """Rank 0's values count. The others draw nothing: threads share their generator."""
    return {"init": default_init if comm.rank == 0 else _zeroed}


def _zeroed(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.zeros_(tensor)
