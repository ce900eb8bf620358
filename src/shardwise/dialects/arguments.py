"""A report as the keyword arguments of ``shard()``."""

from __future__ import annotations

from typing import Any

from shardwise.dialects.interpret import Report
from shardwise.offload import Offload
from shardwise.precision import Precision
from shardwise.schedule.events import Prefetch
from shardwise.train.shard_arguments import checkpointing_of, wrap_of
from shardwise.train.sharding_config import ShardingConfig

__all__ = ["shard_arguments"]


def shard_arguments(report: Report) -> dict[str, Any]:
    """What ``sw.shard(model, **arguments)`` takes; keys that are not used have no argument.

    Raises:
        ConfigError: keys contradict each other.
    """
    report.check()
    recipe, elsewhere = report.places()
    named = recipe.get("sharding", {})
    config = ShardingConfig.model_validate(named)
    arguments = {name: getattr(config, name) for name in named}
    if "wrap" in named:
        arguments["wrap"] = wrap_of(config)
    if "prefetch" in named:
        arguments["prefetch"] = Prefetch(**config.prefetch.model_dump())
    if "offload" in named:
        arguments["offload"] = Offload(**dict.fromkeys(config.offload, True))
    if "precision" in named:
        arguments["precision"] = Precision(**config.precision.arguments())
    if arguments.pop("activation_offload", False):
        arguments["activation_checkpointing"] = checkpointing_of(config)
    options = ((place.partition("."), value) for place, value in elsewhere.items())
    return arguments | {name: value for (part, _, name), value in options if part == "sharding"}
