"""Strategies by name: a strategy is where things live, and nothing else.

Parameters, gradients and optimizer state are each replicated or split. Everything that a strategy
does in a step follows from that in ``schedule``, so a new one is a row of this table.
"""

from __future__ import annotations

from enum import Enum

from shardwise.config.placement import Placement
from shardwise.errors import ConfigError, nearest
from shardwise.errors.synonyms import parse_strategy

_SHARD, _BOTH = ("shard",), ("shard", "replicate")
PRESETS = {
    preset.name: preset
    for preset in (
        Placement("no_shard"),
        Placement("zero1", (), (), _SHARD),
        Placement("shard_grad_op", (), _SHARD, _SHARD),
        Placement("full_shard", _SHARD, _SHARD, _SHARD),
        Placement("hybrid_shard_zero2", (), _SHARD, _SHARD, hybrid=True),
        Placement("hybrid_shard", _SHARD, _SHARD, _SHARD, hybrid=True),
        Placement("hybrid_full", _SHARD, _SHARD, _BOTH, hybrid=True),
    )
}

STRATEGIES = tuple(name for name, preset in PRESETS.items() if not preset.hybrid)
"""Those over one axis, by name, from the most replicated to the most sharded."""


def placement_of(name: str | int | Enum | Placement) -> Placement:
    """The preset of this name; any case, ``-`` for ``_``, and the field's other names.

    Args:
        name: also a member of torch's ``ShardingStrategy`` or its number, as accelerate has it, or
            a placement of your own, which is returned.

    Raises:
        ConfigError: no such strategy; the message lists those there are.
    """
    if isinstance(name, Placement):
        return name
    key = parse_strategy(name)
    if key in PRESETS:
        return PRESETS[key]
    raise ConfigError(
        f"strategy {name!r} does not exist; nearest is {nearest(key, PRESETS)[0]!r}. "
        f"Choose one of {', '.join(PRESETS)}."
    )
