"""A linear map whose weight's gradient is computed where it will be sent from.

Autograd makes the gradient in new memory, and it is copied into the gradient bucket. For a large
matrix that is another matrix beside its slot, and a pass over both. Here the product that makes it
writes into the slot. The graph is as before but for the name of a node: the weight is an input of
it, so hooks, ``torch.autograd.grad`` and a second derivative see what they would see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.torch_internals import computes_forward_derivatives, hooks_of, is_transformed

LARGE = 1 << 18  # elements of a weight: below this a copy costs less than a node in Python


def is_large(module: nn.Module) -> bool:
    """Is it torch's own linear map, with a weight that is worth it?"""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return module.weight.numel() >= LARGE


def linear_in_slot(module: Any) -> Callable[[Tensor], Tensor]:
    """A ``forward`` of an ``nn.Linear`` with the same values and gradients, bit for bit."""
    plain: Callable[[Tensor], Tensor] = module.forward

    def linear(x: Tensor) -> Tensor:
        weight, kind = module.weight, x.device.type
        is_trained = torch.is_grad_enabled() and weight.requires_grad and "slot" in vars(weight)
        if not is_trained or x.dim() < 2 or not x.is_contiguous():  # other products, other bits
            return plain(x)
        special = torch.compiler.is_compiling() or torch.is_autocast_enabled(kind)
        if special or is_transformed() or computes_forward_derivatives():
            return plain(x)
        out: Tensor = cast("Any", _Linear).apply(x, weight, module.bias)
        return out

    return linear


class _Linear(torch.autograd.Function):
    """``F.linear``, as autograd differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.param = weight  # what was saved may come back as another tensor
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, weight.shape[0])  # [n, out]
        plain = to_weight and not torch.is_grad_enabled() and not hooks_of(ctx.param)
        slot = ctx.param.slot() if plain else None
        return (
            rows.mm(weight).view(x.shape) if to_x else None,
            torch.mm(rows.t(), x.reshape(-1, weight.shape[1]), out=slot) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )
