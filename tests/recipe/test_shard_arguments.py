from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.plan.units import wrap
from shardwise.recipe.shard_arguments import shard_arguments, wrap_of
from shardwise.recipe.sharding_config import ShardingConfig


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("auto", wrap.automatic),
        ("none", wrap.whole),
        ("Block", lambda: wrap.by_class("Block")),
        (["Block", "MLP"], lambda: wrap.by_class("Block", "MLP")),
        (500, lambda: wrap.by_size(500)),
    ],
)
def test_each_way_to_write_wrap_is_a_rule(
    written: object, expected: Callable[[], wrap.Wrap]
) -> None:
    config = ShardingConfig.model_validate({"wrap": written})
    assert str(wrap_of(config)) == str(expected())


@pytest.mark.parametrize(("buffers", "alike"), [("local", False), ("broadcast", True)])
def test_buffers_are_a_ranks_own_or_those_of_rank_0(buffers: str, alike: bool) -> None:
    def rank(comm: Comm) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        arguments = shard_arguments(ShardingConfig.model_validate({"buffers": buffers}))
        sw.shard(model, comm=comm, **arguments)
        for _ in range(2):
            model(torch.full((3, 4), float(comm.rank))).sum().backward()
        return model[1].running_mean  # type: ignore[return-value]

    first, second = threads.run(2, rank)
    assert torch.equal(first, second) == alike


def test_bytes_and_units_that_stay_unsharded_save_gathers() -> None:
    def gathers(unsharded: str | list[str] | int) -> int:
        arguments = shard_arguments(ShardingConfig(wrap=["Linear"], unsharded=unsharded))
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        runs = threads.run(2, lambda comm: sw.shard(layers, comm=comm, **arguments).schedule)
        return str(runs[0]).count("gather ")

    assert gathers(400) == gathers("400") == gathers(["1"]) == gathers(0) - 1
