"""The global gradient norm, with one collective, and the same bits in every strategy.

``torch.nn.utils.clip_grad_norm_`` on shards would give each rank the norm of its own part,
silently. The sum of powers is formed over the same W pieces whether a rank holds one of them
or all, and these W sums are added by one kernel, so ``no_shard`` and ``full_shard`` clip alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ConfigError

__all__ = ["clip_gradients", "norm_of", "total_norm"]

CHUNK = 1 << 16
"""Elements: on CPU, torch adds up millions of squares one by one, and is off by up to 1e-3."""


def clip_gradients(
    buckets: Sequence[Bucket], comm: Comm, max_norm: float, norm_type: float
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    Args:
        buckets: the trainable buckets of the model.
        comm: the ranks that split them.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm; ``inf`` for the largest magnitude.

    Returns:
        The norm before clipping, 0-dim fp32, the same on every rank.

    Raises:
        ConfigError: there is no such norm.
    """
    if not norm_type > 0:
        raise ConfigError(
            f"norm_type is {norm_type}; a norm needs a p above 0, such as 2 or float('inf')."
        )
    norm = total_norm(buckets, comm, norm_type)
    gradients = [p.grad for bucket in buckets for p in bucket.params if p.grad is not None]
    if gradients:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for dtype in {grad.dtype for grad in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype is dtype], scale.to(dtype))
    return norm


def total_norm(buckets: Sequence[Bucket], comm: Comm, norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients of all ranks' shards, 0-dim fp32."""
    whole = all(not bucket.spec.placement.splits for bucket in buckets)
    ranks = range(comm.size) if whole else (comm.rank,)
    return norm_of({rank: _piece(buckets, rank) for rank in ranks}, comm, norm_type)


def norm_of(pieces: Mapping[int, Sequence[Tensor]], comm: Comm, norm_type: float = 2.0) -> Tensor:
    """The p-norm of all ranks' pieces. One collective, unless every piece is here.

    Args:
        pieces: by rank, flat gradients: this rank's, or every rank's.
        comm: the ranks.
        norm_type: the p.

    Returns:
        0-dim fp32, the same bits on every rank.
    """
    powers = torch.zeros(comm.size, dtype=torch.float32, device=comm.device)
    for rank, gradients in pieces.items():
        powers[rank] = _power(gradients, norm_type, comm.device)
    if len(pieces) < comm.size:
        comm.all_gather(powers, Label("norm", "gradients")).wait()
    if norm_type == float("inf"):
        return powers.max()
    # One kernel over the same W numbers, so that every strategy rounds alike.
    return powers.sum() ** (1.0 / norm_type)


def _piece(buckets: Sequence[Bucket], rank: int) -> list[Tensor]:
    """The gradients of rank ``rank``'s piece, flat."""
    found: list[Tensor] = []
    for bucket in buckets:
        for index, param in enumerate(bucket.params):
            if param.grad is None:
                continue
            flat = param.grad.reshape(-1)
            if not bucket.spec.placement.splits:
                slot = bucket.layout.slot(bucket.members[index].name)
                start, stop = bucket.layout.owned(slot, rank)
                flat = flat[start:stop]
            found.append(flat)
    return found


def _power(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of ``|g| ** p`` (for ``inf``: the maximum of ``|g|``)."""
    gradients = [grad.float() for grad in gradients if grad.numel()]
    if device.type == "cpu":
        gradients = [chunk for grad in gradients for chunk in grad.split(CHUNK)]
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack(torch._foreach_norm(gradients, norm_type))
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
