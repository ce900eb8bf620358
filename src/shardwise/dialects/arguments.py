"""A report as the keyword arguments of ``shard()``."""

from __future__ import annotations

from typing import Any

from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.dialects.interpret import Report
from shardwise.recipe.shard_arguments import checkpointing_of, wrap_of
from shardwise.recipe.sharding_config import ShardingConfig


def shard_arguments(report: Report) -> dict[str, Any]:
    """Return the arguments of ``sw.shard(model, …)``; keys that are not used have none.

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
    if "precision" in named:
        arguments["precision"] = Precision(**config.precision.arguments())
    if arguments.pop("activation_offload", False):
        arguments["activation_checkpointing"] = checkpointing_of(config)
    options = ((place.partition("."), value) for place, value in elsewhere.items())
    return arguments | {name: value for (part, _, name), value in options if part == "sharding"}
