"""Strategies by all their names."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("FULL_SHARD", "full_shard"),
        ("zero-3", "full_shard"),
        ("Shard_Grad_Op", "shard_grad_op"),
        ("ZeRO-2", "shard_grad_op"),
        ("zero1", "zero1"),
        ("DDP", "no_shard"),
        (" no-shard ", "no_shard"),
        (1, "full_shard"),
        ("2", "shard_grad_op"),
        (3, "no_shard"),
        (ShardingStrategy.FULL_SHARD, "full_shard"),
        (ShardingStrategy.SHARD_GRAD_OP, "shard_grad_op"),
        (ShardingStrategy.NO_SHARD, "no_shard"),
        ("ShardingStrategy.NO_SHARD", "no_shard"),
        (4, "hybrid_shard"),
        ("HYBRID_SHARD", "hybrid_shard"),
        ("HSDP", "hybrid_shard"),
        (ShardingStrategy.HYBRID_SHARD, "hybrid_shard"),
        (5, "hybrid_shard_zero2"),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, "hybrid_shard_zero2"),
        ("HFSDP", "hybrid_full"),
    ],
)
def test_strategies_are_known_by_all_their_names(name: str, canonical: str) -> None:
    assert placement_of(name).name == canonical


def test_an_unknown_strategy_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"nearest is .full_shard.*no_shard, zero1"):
        placement_of("full_shrad")
