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
from shardwise.config.precision import dtype_name
from shardwise.errors import ConfigError


def check_batch_norm(model: nn.Module, comm: Comm) -> None:
    """Raises ``ConfigError`` for what would be trained with the statistics of one rank's rows."""
    if comm.device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise ConfigError(
                f"{name!r} is a SyncBatchNorm, which torch has for accelerators only: on several "
                f"CPU ranks (now {comm.size}) a training step would fail, or use the statistics of "
                'its own rank. Keep nn.BatchNorm and pass buffers="average" or "broadcast", which '
                "make running statistics equal; to validate only, call model.eval() before "
                "shard()."
            )


def sync_buffers(model: nn.Module, policy: str, comm: Comm) -> None:
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
            averages = policy == "average" and dtype.is_floating_point
            _sync(buffers, comm, averages)


def _sync(buffers: Sequence[Tensor], comm: Comm, averages: bool) -> None:
    """``buffers``, of one dtype, by one collective: the mean over ranks, or rank 0's."""
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
    wide = rows if rows.dtype is torch.float64 else rows.float()  # 8 bits have no arithmetic
    mean = torch.empty_like(wide[0])
    sum_in_rank_order(mean, wide.unbind(), divisor=len(rows))
    return torch.where((wide == wide[0]).all(0), wide[0], mean).to(rows.dtype)
