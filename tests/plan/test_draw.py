"""A model as ``shard()`` would cut it, for ranks that need not exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.comm.grid import Grid
from shardwise.config.options import Options
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.blueprint import draw_on, units_of
from shardwise.plan.draw import draw
from tests.copies import error_text
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
    assert error_text(ConfigError, lambda: draw(nn.Linear(2, 2), ranks=(rank, 4))) == (
        f"rank {rank} of 4: ranks are numbered from 0 to 3."
    )


def test_on_an_accelerator_its_vendors_library_sums() -> None:
    placement, options = placement_of("no_shard"), Options()
    units = units_of(decoder(), None, options, joined=1 << 20)
    for device in ("cpu", "cuda"):
        grid = Grid.of(0, 2, splits=False)
        blueprint = draw_on(grid, torch.device(device), units, placement, options)
        assert {axis.by_messages for axis in blueprint.grid} == {device == "cpu"}
        assert {spec.exchanges for spec in blueprint.buckets} == {device == "cpu"}
