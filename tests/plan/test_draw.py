"""A model as ``shard()`` would cut it, for ranks that need not exist."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.draw import draw
from tests.copies import said
from tests.nets import decoder


def test_no_rank_has_to_exist_and_the_model_stays_as_it_is() -> None:
    model = decoder()
    before = {name: (param, param.shape) for name, param in model.named_parameters()}
    blueprint = draw(model, "hybrid_shard", ranks=(1000, 1024), mesh=(128, 8))
    assert str(blueprint.shape) == "replicate=128 × shard=8"
    assert {spec.position for spec in blueprint.buckets} == {1000 % 8}
    assert {name: (param, param.shape) for name, param in model.named_parameters()} == before


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_is_one_of_them(rank: int) -> None:
    assert said(ConfigError, lambda: draw(nn.Linear(2, 2), ranks=(rank, 4))) == (
        f"rank {rank} of 4: ranks are numbered from 0 to 3."
    )
