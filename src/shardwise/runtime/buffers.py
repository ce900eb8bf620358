"""Buffers that every rank has alike between steps, by policy.

Forward passes change buffers, running statistics above all, from the rows of their own rank. They
stay as they are (``local``), or one collective for each dtype makes them alike when gradients
have been reduced. DDP broadcasts at the beginning of the next forward pass; at the end of a step,
validation and checkpoints in between see the same values, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Comm, Label
from shardwise.comm.reduction import sum_in_rank_order
from shardwise.precision import dtype_name

__all__ = ["sync_buffers"]


def sync_buffers(model: nn.Module, comm: Comm, policy: str) -> None:
    """Make the buffers of all ranks alike. One collective for each dtype.

    Args:
        policy: ``"broadcast"``: those of rank 0; ``"average"``: their means over ranks, and rank
            0's of integers and booleans; ``"local"``: nothing is changed.
    """
    if policy == "local" or comm.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for dtype, buffers in by_dtype.items():
            _sync(buffers, comm, policy == "average" and dtype.is_floating_point)


def _sync(buffers: Sequence[Tensor], comm: Comm, averages: bool) -> None:
    """``buffers``, of one dtype, by one collective."""
    given = torch.cat([buffer.reshape(-1) for buffer in buffers])
    label = Label("buffers", dtype_name(given.dtype))
    if averages:
        alike = _mean(comm.gather_rows(given, label))
    else:
        alike = comm.memory.gradient(given.numel(), given.dtype).copy_(given)
        comm.broadcast(alike, 0, label).wait()
    sizes = [buffer.numel() for buffer in buffers]
    for buffer, values in zip(buffers, alike.split(sizes), strict=True):
        buffer.copy_(values.view(buffer.shape))


def _mean(rows: Tensor) -> Tensor:
    """``[W, n] → [n]``. What is the same on every rank, ``-inf`` of a mask too, stays as it is."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    mean = torch.empty(rows.shape[1], dtype=wide, device=rows.device)
    sum_in_rank_order(mean, rows.unbind(), divisor=len(rows))
    return torch.where((rows == rows[0]).all(0), rows[0], mean.to(rows.dtype))
