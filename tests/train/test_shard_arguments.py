from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.train.shard_arguments import wrap_of
from shardwise.train.sharding_config import ShardingConfig
from shardwise.units import wrap


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("auto", wrap.automatic),
        ("none", wrap.whole),
        ("Block", lambda: wrap.by_class("Block")),
        (["Block", "MLP"], lambda: wrap.by_class("Block", "MLP")),
        (500, lambda: wrap.by_size(500)),
    ],
)
def test_each_way_to_write_wrap_is_a_rule(said: object, wanted: Callable[[], wrap.Wrap]) -> None:
    config = ShardingConfig.model_validate({"wrap": said})
    assert str(wrap_of(config)) == str(wanted())
