"""Parameters as the leaves of autograd's graph: when a gradient is there, and who asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwise.guard import ShardedParameter

__all__ = ["is_handed_out", "on_gradient"]


def on_gradient(param: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Call ``hook`` after each gradient. One that is frozen now may be trained later.

    Returns:
        A handle, whose ``remove()`` undoes it.
    """
    trained = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trained)


def is_handed_out(param: nn.Parameter) -> bool:
    """Is the running backward pass an autograd.grad that was asked for this parameter?

    torch answers by an error, since the leaf is neither executed nor left out.
    """
    if isinstance(param, ShardedParameter):  # which answers for itself, before it begins
        return False
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:
        return True
    return False
