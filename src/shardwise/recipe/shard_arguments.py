"""A recipe's section ``sharding`` as arguments of ``sw.shard``."""

from __future__ import annotations

from typing import Any

from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.errors import ConfigError
from shardwise.plan.units import wrap as wraps
from shardwise.plan.units.wrap import Wrap
from shardwise.recipe.sharding_config import ShardingConfig


def shard_arguments(config: ShardingConfig) -> dict[str, Any]:
    """All arguments but the model, the comm and what initialises the model."""
    return {
        "strategy": config.strategy,
        "wrap": wrap_of(config),
        "mesh": config.mesh,
        "bucketing": config.bucketing,
        "buffers": config.buffers,
        "unsharded": config.unsharded,
        "activation_checkpointing": checkpointing_of(config),
        "compile": config.compile,
        "offload": config.offload,
        "prefetch": Prefetch(**config.prefetch.model_dump()),
        "precision": Precision(**config.precision.arguments()),
    }


def checkpointing_of(config: ShardingConfig) -> bool | ActivationCheckpointing:
    """Recompute repeated units, with their inputs on the host or the device, or none."""
    if config.activation_offload and not config.activation_checkpointing:
        raise ConfigError(
            "sharding.activation_offload keeps the inputs of blocks that are recomputed, and none "
            "is; set sharding.activation_checkpointing: true."
        )
    if not config.activation_checkpointing:
        return False
    every = int(config.activation_checkpointing)
    return ActivationCheckpointing(every=every, offload=config.activation_offload)


def wrap_of(config: ShardingConfig) -> Wrap:
    """The wrap policy for ``auto``, ``none``, class names, or a minimum number of parameters."""
    if isinstance(config.wrap, int):
        return wraps.by_size(config.wrap)
    policies = {"auto": wraps.automatic, "none": wraps.whole}
    if isinstance(config.wrap, str) and config.wrap in policies:
        return policies[config.wrap]()
    return wraps.by_class(config.wrap)
