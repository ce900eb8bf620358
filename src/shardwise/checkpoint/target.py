"""What a checkpoint needs of a sharded model: the engine's parts, and nothing of the front door."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm
from shardwise.strategies import Placement


class ShardedModel(Protocol):
    """A sharded model's handle, as the checkpoints see it.

    Attributes:
        loaded_token: of the checkpoint that was loaded last, which no save removes; or ``""``.
    """

    model: nn.Module
    comm: Comm
    placement: Placement
    buckets: tuple[Bucket, ...]
    loaded_token: str
