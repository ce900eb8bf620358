"""The handle of a sharded model, as optimizers and checkpoints use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from shardwise.comm.protocol import Comm
from shardwise.config.placement import Placement
from shardwise.memory.parameters import Bucket


@runtime_checkable
class ShardedModel(Protocol):
    """The parts of a sharded model's handle that optimizers and checkpoints need."""

    model: nn.Module
    comm: Comm
    placement: Placement
    buckets: tuple[Bucket, ...]
    runtime: Any  # ``runtime.runtime.Runtime``, which counts the steps of optimizers
    _background: Any  # ``checkpoint.background.Background``: the save that is under way

    def admitted(
        self,
        operation: str,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        awaits_readers: bool = False,
    ) -> Sequence[Optimizer]:
        """Between steps only: the optimizers, if their state is that of this model's shards."""
