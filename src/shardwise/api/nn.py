"""Functions for models with large vocabularies."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.memory.sharding import sharding_of

__all__ = ["chunked_cross_entropy"]

LEAST_ROWS = 128  # chunks of fewer are slower


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """The cross-entropy of ``head(hidden)``, without ever holding all logits.

    ``head`` runs at places with a label only. Its logits are made chunk by chunk and turned into
    gradients in the forward pass, so ``backward`` runs once, and only first derivatives exist. A
    head other than ``nn.Linear``, such as a quantised one or one with an adapter, makes them once
    more in the backward pass. It may be sharded: its unit is gathered while this runs, also after
    the model's forward pass.

    Args:
        hidden: floating point, ``[..., features]``, in the dtype in which ``head`` computes.
        head: an ``nn.Linear``, ``features`` → ``vocabulary``, or a module around one.
        target: int64, the shape of ``hidden`` without its last dimension.
        ignore_index: the target of places without a label; ``None``: every place has one.
        reduction: ``"mean"`` over the labels, or their ``"sum"``.
        chunk: labels at a time; ``None``: as ``chunk_bytes`` says.
        chunk_bytes: of a chunk's logits in float32; ``None``: those of ``hidden`` in float32, but
            at least 128 labels.

    Returns:
        0-dim, float32, or float64 as ``hidden``; of no labels the mean is NaN, and the sum 0.

    Raises:
        ConfigError: shapes or dtypes do not fit, or a chunk is below 1.
    """
    linear = _linear(head)
    _check(hidden.shape, (*target.shape, linear.in_features), target, (chunk, chunk_bytes))

    def loss(hidden: Tensor) -> Tensor:
        rows = chunk or (chunk_bytes or 4 * hidden.numel()) // (4 * linear.out_features)
        rows = max(rows, 1 if chunk or chunk_bytes else LEAST_ROWS)
        labels = target.flatten()
        places = None if ignore_index is None else (labels != ignore_index).nonzero().squeeze(1)
        hidden = hidden.flatten(0, -2)
        if places is not None and len(places) < len(labels):
            hidden, labels = hidden.index_select(0, places), labels[places]
        total = _sum(hidden, head, labels, rows)
        return total / len(labels) if reduction == "mean" else total

    sharding = sharding_of(next(head.parameters()))
    if sharding is None or (engine := sharding.engine()) is None:
        return loss(hidden)
    called: Tensor = engine.call(head, sharding.unit, loss, (hidden,), {})
    return called


def _linear(head: nn.Module) -> nn.Linear:
    """``head`` itself, or the one inside it."""
    linear = next((part for part in head.modules() if isinstance(part, nn.Linear)), None)
    if linear is None:
        raise ConfigError(f"head is a {type(head).__name__} without an nn.Linear. Pass one with.")
    return linear


def _check(given: torch.Size, needed: tuple[int, ...], target: Tensor, sizes: Any) -> None:
    """Raise ``ConfigError`` for shapes or dtypes that do not fit, or a size below 1."""
    if given != needed:
        raise ConfigError(
            f"hidden is {tuple(given)} and target {tuple(target.shape)}: hidden has the "
            f"target's dimensions and then the head's {needed[-1]} features."
        )
    if target.dtype is not torch.int64 or any(size is not None and size < 1 for size in sizes):
        raise ConfigError(
            f"target is {target.dtype}, chunk {sizes[0]} and chunk_bytes {sizes[1]}: targets are "
            "int64 token ids, and a chunk is of 1 token and 1 byte or more."
        )


def _sum(hidden: Tensor, head: Any, labels: Tensor, rows: int) -> Tensor:
    """The sum over all ``labels``, ``rows`` a time; ``hidden`` is ``[labels, features]``."""
    learns = torch.is_grad_enabled()
    if learns and type(head).forward is nn.Linear.forward:
        with_gradients: Any = _WithGradients.apply
        total: Tensor = with_gradients(hidden, head.weight, head.bias, labels, rows)
        return total

    def summed(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head.forward(hidden)
        return F.cross_entropy(logits.to(_wide(logits)), labels, reduction="sum")

    step = partial(checkpoint, summed, use_reentrant=False) if learns else summed
    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.stack([step(*chunk) for chunk in chunks]).sum()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _WithGradients(torch.autograd.Function):
    """The sum over a linear head's labels; the logits of a chunk become its gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int
    ) -> Tensor:
        wide, needed = _wide(hidden), ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

        def add(begin: int) -> Tensor:
            some, label = hidden[begin : begin + rows], labels[begin : begin + rows]
            logits = F.linear(some, weight, bias)  # [rows, vocabulary]
            p = logits.to(wide).log_softmax(1)
            loss = F.nll_loss(p, label, reduction="sum")
            p.exp_()[torch.arange(len(label), device=label.device), label] -= 1
            slope = p.to(logits.dtype)
            if of_hidden is not None:
                of_hidden[begin : begin + rows] = slope @ weight
            if of_weight is not None:
                of_weight.add_(slope.T @ some)
            if of_bias is not None:
                of_bias.add_(slope.sum(0))
            return loss

        losses = [add(begin) for begin in range(0, len(labels), rows)]
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.labels = len(labels)
        return torch.stack([hidden.new_zeros((), dtype=wide), *losses]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of no labels are 0, also of their mean, which is 0 by 0."""
        saved, scale = ctx.saved_tensors, gradients[0] if ctx.labels else 1
        return (*(None if t is None else t.mul_(scale) for t in saved), None, None)
