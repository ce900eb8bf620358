"""Whole values of a bucket's parameters in new memory, outside the step: each is a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.protocol import Label
from shardwise.memory.parameters import Bucket
from shardwise.torch_internals import disable_torch_function


def gather_whole(bucket: Bucket) -> list[Tensor]:
    """Every parameter whole, in its stored dtype."""
    if not bucket.gathered:
        bucket.adopt()
    return _gather(bucket, bucket.shard)


def gather_parts(
    bucket: Bucket, parts: Sequence[Tensor | None], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Whole values, for each parameter, of what ranks have one part of.

    Args:
        parts: per parameter, in the shape of its shard; ``None`` counts as zeros.
        dtype: of all of them; ``None`` = the shard's.
    """
    flat = torch.zeros_like(bucket.shard, dtype=dtype)
    with disable_torch_function():
        for view, part in zip(bucket.spec.rest_views(flat), parts, strict=True):
            if part is not None:
                view.copy_(part.view(view.shape))
    return _gather(bucket, flat)


def _gather(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Gather what is laid out like the shard."""
    spec, mesh, device = bucket.spec, bucket.mesh, bucket.full.device
    if spec.allocation.whole:
        return spec.full_views(flat.to(device, copy=True))
    full = torch.empty(spec.layout.numel, dtype=flat.dtype, device=device)
    spec.own(full).copy_(flat)
    label = Label("whole", spec.title)
    if spec.splits_copies:
        mesh.replicate.all_gather(spec.sent(full), label).wait()
    mesh.shard.all_gather(full, label).wait()
    return spec.full_views(full)
