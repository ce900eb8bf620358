"""Layers whose weight's gradient is computed where it will be sent from.

Autograd makes the gradient in new memory, and it is copied into the gradient bucket. For a large
matrix that is another matrix beside its slot, and a pass over both. Here what makes it writes into
the slot, where ``Gradients.lend`` allows it; in a forecast it has no memory. The graph is as before
but for the name of a node: its inputs are those of torch's node in the same order, and a linear map
keeps the weight as the view of the gathered bucket that the forward pass computed with. The
parameter itself must not be kept: autograd would read what it shows by then, which may be a shard.

    linear map    the product of its rows and inputs is written to the slot
    embedding     the sums for the rows that were looked up are, among zeros

A weight that a head and an embedding share has one gradient. The head's comes first and takes the
slot; what the embedding adds are a few rows, which follow when the slot is back.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Does it compute as torch's own layer does, with a weight that is worth it?"""
    kind = _kind(module)
    if kind is None or type(module).forward is not kind.forward:
        return False
    # Where a parametrization computes it, to read it would change that of spectral norm.
    weight = parameters_of(module).get("weight")
    return "forward" not in vars(module) and weight is not None and weight.numel() >= LARGE


def forward_in_slot(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A ``forward`` of an ``nn.Linear`` or ``nn.Embedding`` of the same values, bit for bit.

    The gradients of their weights are, too.
    """
    layer, plain = _LAYERS[_kind(module)], module.forward
    # A function: blocks that are compiled share one graph of it, and have one each of a partial().
    return lambda x: _forward(module, layer, plain, x)


def is_in_slot(forward: object) -> bool:
    """Is it a forward of ours, which computes what torch's layer does?"""
    return getattr(forward, "__module__", "") == __name__


def _kind(module: nn.Module) -> Any:
    return next((kind for kind in _LAYERS if isinstance(module, kind)), None)


def _forward(
    module: Any, layer: Callable[..., Any], plain: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    weight = module.weight
    if torch.compiler.is_compiling() or not _is_ordinary(x, weight):
        return plain(x)
    out = layer(module, unwrap_if_dead(x), weight)
    return plain(x) if out is None else out


def _is_ordinary(x: Tensor, weight: Tensor) -> bool:
    """Is the weight a gathered one, and do gradients alone look at what is computed?"""
    if not (torch.is_grad_enabled() and weight.requires_grad and "lend_slot" in vars(weight)):
        return False
    kind = type(weight)  # torch's own, or the engine's while a unit is whole, which tells of writes
    if not (kind is nn.Parameter or "before_write" in vars(kind)) or type(x) is not Tensor:
        return False
    special = torch.is_autocast_enabled("cpu") or is_transformed()
    return (x.is_cpu or x.is_meta) and not special and not computes_forward_derivatives()


# ---- linear maps ---------------------------------------------------------------------------


def _linear(module: Any, x: Tensor, weight: Any) -> Tensor | None:
    if x.dim() not in (2, 3) or not x.is_contiguous():  # other products, other bits
        return None
    return _apply_linear(module.bias, x, weight.t(), weight.lend_slot)


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


_apply_linear: Callable[..., Tensor] = apply_of(_Linear)


# ---- embeddings ----------------------------------------------------------------------------


def _embedding(module: Any, ids: Tensor, weight: Any) -> Tensor | None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return None
    skipped = -1 if module.padding_idx is None else module.padding_idx
    return _apply_embedding(weight, ids, skipped, weight.lend_slot, weight.add_rows)


class _Embedding(torch.autograd.Function):
    """``F.embedding``, as autograd differentiates it; the row ``skipped`` has no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, skipped: int, *slot: Any) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count, ctx.skipped, ctx.slot = len(weight), skipped, slot
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (lend, add_rows) = ctx.saved_tensors, ctx.slot
        distinct, sums = _sums(grad, ids, ctx.skipped)
        whole = None
        if not torch.is_grad_enabled():
            whole = lend(grad.dtype)
            if whole is None and add_rows(distinct, sums):
                return None, None, None, None, None
        whole = grad.new_empty(ctx.count, grad.shape[-1]) if whole is None else whole
        return whole.zero_().index_copy_(0, distinct, sums), None, None, None, None


def _sums(grad: Tensor, ids: Tensor, skipped: int) -> tuple[Tensor, Tensor]:
    """``[..., d]``, ``[...] →`` each id once, ``[m]``, and the sums for it, ``[m, d]``."""
    rows, ids = grad.reshape(-1, grad.shape[-1]), ids.reshape(-1).long()
    if ids.is_meta:  # which of them are alike is not known
        return ids, rows
    distinct, places = ids.unique(return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(rows, places, len(distinct), -1, False)
    if skipped < 0:
        return distinct, sums
    kept = distinct != skipped
    return distinct[kept], sums[kept]


_apply_embedding: Callable[..., Tensor] = apply_of(_Embedding)
_LAYERS: dict[Any, Callable[..., Tensor | None]] = {nn.Linear: _linear, nn.Embedding: _embedding}
