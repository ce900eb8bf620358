"""``SFTTrainer`` of TRL that shards its model in place of DDP and FSDP.

    from shardwise.integrations.trl import SFTTrainer

TRL computes the loss from the head's weight, without calling the head. So the head cannot be a
unit of its own: it is in the root unit, which is whole during a step, as in accelerate's FSDP.
"""

from __future__ import annotations

from typing import Any

import trl

from shardwise.integrations.transformers import Trainer
from shardwise.units import wrap

__all__ = ["SFTTrainer"]


class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """``trl.SFTTrainer``, with a sharded model."""

    def sharding(self) -> dict[str, Any]:
        """The arguments of ``shard()``; units are the blocks, unless ``fsdp_config`` says which."""
        blocks = getattr(self.model, "_no_split_modules", None)
        return {"wrap": wrap.by_class(*blocks) if blocks else wrap.whole(), **super().sharding()}
