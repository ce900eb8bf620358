"""Strategies by name: a strategy is where things live, and nothing else.

Parameters, gradients and optimizer state are each replicated or split. Everything that a strategy
does in a step follows from that in ``schedule``, so a new one is a row of this table.
"""

from __future__ import annotations

from enum import Enum

from shardwise.errors import ConfigError, nearest
from shardwise.schedule.placement import Placement
from shardwise.synonyms import parse_strategy

_PRESETS = {
    "no_shard": Placement("no_shard", splits=False, resident=True, frees=False),
    "zero1": Placement("zero1", splits=True, resident=True, frees=False),
    "shard_grad_op": Placement("shard_grad_op", splits=True, resident=False, frees=False),
    "full_shard": Placement("full_shard", splits=True, resident=False, frees=True),
}

STRATEGIES = tuple(_PRESETS)
"""Their names, from the most replicated to the most sharded."""


def placement_of(name: str | int | Enum) -> Placement:
    """The preset of this name; any case, ``-`` for ``_``, and the field's other names.

    Args:
        name: also a member of torch's ``ShardingStrategy`` or its number, as accelerate has it.

    Raises:
        ConfigError: no such strategy; the message lists those there are.
    """
    key, hybrid = parse_strategy(name)
    if key in _PRESETS and not hybrid:
        return _PRESETS[key]
    why = "does not exist"
    if hybrid:
        why = f"is {key} in groups of ranks with copies between the groups, and not there yet"
    raise ConfigError(
        f"strategy {name!r} {why}; nearest is {nearest(key, _PRESETS)[0]!r}. "
        f"Choose one of {', '.join(_PRESETS)}."
    )
