"""A linear map whose weight's gradient is computed where it will be sent from.

Autograd makes the gradient in new memory, and it is copied into the gradient bucket. For a large
matrix that is another matrix beside its slot, and a pass over both. Here the product that makes it
writes into the slot, where ``Gradients.lend`` allows it; in a forecast it has no memory. The graph
is as before but for the name of a node: its inputs are those of ``addmm`` in the same order, and
the weight is kept as the view of the gathered bucket that the forward pass computed with. The
parameter itself must not be kept: autograd would read what it shows by then, which may be a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.torch_internals import (
    apply_of,
    computes_forward_derivatives,
    is_transformed,
    parameters_of,
    unwrap_if_dead,
)

LARGE = 1 << 18  # elements of a weight: below this a copy costs less than a node in Python


def is_large(module: nn.Module) -> bool:
    """Does it compute as torch's own linear map does, with a weight that is worth it?"""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    # Where a parametrization computes it, to read it would change that of spectral norm.
    weight = parameters_of(module).get("weight")
    return "forward" not in vars(module) and weight is not None and weight.numel() >= LARGE


def linear_in_slot(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A ``forward`` of an ``nn.Linear`` with the same values and gradients, bit for bit."""
    return partial(_forward, module, module.forward)


def is_in_slot(forward: object) -> bool:
    """Is it a forward of ours, which computes what ``nn.Linear`` does?"""
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight = module.weight
    if torch.compiler.is_compiling() or not _is_ordinary(x, weight):
        return plain(x)
    return _apply(module.bias, unwrap_if_dead(x), weight.t(), weight.lend_slot)


def _is_ordinary(x: Tensor, weight: Tensor) -> bool:
    """Are these rows times a gathered weight, and do gradients alone look at the product?"""
    if not (torch.is_grad_enabled() and weight.requires_grad and "lend_slot" in vars(weight)):
        return False
    kind = type(weight)  # torch's own, or the engine's while a unit is whole, which tells of writes
    if not (kind is nn.Parameter or "before_write" in vars(kind)) or type(x) is not Tensor:
        return False
    if x.dim() not in (2, 3) or not x.is_contiguous():  # other products, other bits
        return False
    special = torch.is_autocast_enabled("cpu") or is_transformed()
    return (x.is_cpu or x.is_meta) and not special and not computes_forward_derivatives()


class _Linear(torch.autograd.Function):
    """``F.linear``, as autograd differentiates it."""

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor | None, x: Tensor, columns: Tensor, lend: Callable[..., Any]
    ) -> Tensor:
        ctx.save_for_backward(x, columns)  # [..., in], [in, out]
        ctx.lend = lend
        return F.linear(x, columns.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, columns = ctx.saved_tensors
        to_bias, to_x, to_columns, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, columns.shape[1]), x.reshape(-1, x.shape[-1])
        slot = None if torch.is_grad_enabled() or not to_columns else ctx.lend(rows.dtype)
        # One product after the other: what Python needs, the cache has lost after each.
        of_x = F.linear(rows, columns).view(x.shape) if to_x else None
        of_columns = torch.mm(rows.t(), inputs, out=slot).t() if to_columns else None
        return rows.sum(0) if to_bias else None, of_x, of_columns, None


_apply: Callable[..., Tensor] = apply_of(_Linear)
