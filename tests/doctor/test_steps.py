"""The cost of a step under each strategy, and the peak of memory that the plan adds up."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.comm.protocol import Comm
from shardwise.config.strategies import STRATEGIES
from shardwise.doctor import steps
from shardwise.doctor.steps import StepCost, planned_peak, step_costs
from shardwise.plan.units.wrap import by_class
from tests.ranks import run_threads


def test_each_strategy_has_a_time_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"LAYERS": 2, "WIDTH": 32, "WARM": 1, "STEPS": 2}.items():
        monkeypatch.setattr(steps, name, few)
    for costs in run_threads(2, all_costs):
        assert [cost.strategy for cost in costs] == list(STRATEGIES)
        assert all(cost.milliseconds > 0 and cost.peak is None for cost in costs)


def all_costs(comm: Comm) -> list[StepCost]:
    return list(step_costs(comm))


def test_the_plan_has_shards_gathered_units_and_sums() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    unit = 64 * 64 * 4  # bytes
    tensors = 4 * unit // 2 * 3  # shards, and AdamW's two of each
    planned = planned_peak(model, "full_shard", (0, 2), wrap=by_class(nn.Linear))
    assert tensors + 2 * unit < planned < tensors + 8 * unit
