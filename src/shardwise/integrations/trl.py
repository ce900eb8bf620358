"""Trainers of TRL that shard their model in place of DDP and FSDP.

    from shardwise.integrations.trl import SFTTrainer  # or DPOTrainer, GRPOTrainer

TRL computes losses from the head's weight, without calling the head. So the head cannot be a
unit of its own: it is in the root unit, which is whole during a step, as in accelerate's FSDP.
"""

from __future__ import annotations

from typing import Any

import trl

from shardwise.integrations import transformers
from shardwise.plan.units import wrap

__all__ = ["DPOTrainer", "GRPOTrainer", "SFTTrainer"]


class Trainer(transformers.Trainer):
    """Common base of these trainers. Any other of TRL may be combined with it likewise."""

    def sharding(self) -> dict[str, Any]:
        """The arguments of ``shard()``; units are the blocks, unless ``fsdp_config`` says which."""
        blocks = getattr(self.model, "_no_split_modules", None)
        return {"wrap": wrap.by_class(*blocks) if blocks else wrap.whole(), **super().sharding()}


class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """``trl.SFTTrainer``, with a sharded model."""


class DPOTrainer(Trainer, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    """``trl.DPOTrainer``, with a sharded model; a ``ref_model`` is sharded, too."""


class GRPOTrainer(Trainer, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """``trl.GRPOTrainer``, with a sharded model."""
