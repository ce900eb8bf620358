"""Functions for models with large vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.memory.sharding import sharding_of

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    target: Tensor,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """The mean cross-entropy of ``head(hidden)``, without ever holding all logits.

    Logits of ``chunk`` tokens at a time are made and turned into gradients in the forward pass, by
    ``torch.nn.functional.linear_cross_entropy`` of torch 2.13. So ``backward`` runs once, and only
    first derivatives exist. An older torch makes them once more in the backward pass. ``head`` may
    be sharded: its unit is gathered while this runs, also after the model's forward pass.

    Args:
        hidden: floating point, ``[..., features]``, in the dtype in which ``head`` computes.
        head: ``features`` → ``vocabulary``, with or without a bias.
        target: int64, the shape of ``hidden`` without its last dimension.
        ignore_index: targets that count neither in the sum nor in the mean.
        chunk: tokens at a time; ``None``: as many as make a chunk's logits at most as large as
            ``hidden``.

    Returns:
        0-dim, of ``hidden``'s dtype: the mean over the tokens that are not ignored, NaN if all are.

    Raises:
        ConfigError: shapes or dtypes do not fit, or ``chunk`` is below 1.
    """
    if hidden.shape[:-1] != target.shape or hidden.shape[-1] != head.in_features:
        raise ConfigError(
            f"hidden is {tuple(hidden.shape)} and target {tuple(target.shape)}: hidden has the "
            f"target's dimensions and then the head's {head.in_features} features."
        )
    if target.dtype is not torch.int64 or (chunk is not None and chunk < 1):
        raise ConfigError(
            f"target is {target.dtype} and chunk {chunk}: targets are int64 token ids, and a chunk "
            "is of 1 token or more."
        )

    def loss(hidden: Tensor) -> Tensor:
        if "linear_cross_entropy" not in vars(F):
            rows = chunk or max(1, hidden.numel() // head.out_features)
            return _recomputed(hidden.flatten(0, -2), head, target.flatten(), ignore_index, rows)
        return F.linear_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            target.flatten(),
            linear_bias=head.bias,
            ignore_index=ignore_index,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=chunk),
        )

    sharding = sharding_of(head.weight)
    engine = None if sharding is None or sharding.engine is None else sharding.engine()
    if sharding is None or engine is None:
        return loss(hidden)
    called: Tensor = engine.call(head, sharding.unit, loss, (hidden,), {})
    return called


def _recomputed(
    hidden: Tensor, head: nn.Linear, target: Tensor, ignore_index: int, rows: int
) -> Tensor:
    """The same from torch's checkpointing; ``hidden``, ``[tokens, features]``, ``rows`` a time."""
    wide = torch.promote_types(hidden.dtype, torch.float32)

    def summed(hidden: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, head.weight, head.bias).to(wide)
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    chunks = zip(hidden.split(rows), target.split(rows), strict=True)
    sums = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
    return (torch.stack(sums).sum() / (target != ignore_index).sum()).to(hidden.dtype)
