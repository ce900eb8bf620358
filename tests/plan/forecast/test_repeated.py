"""A few blocks that are observed stand for all, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.plan.draw import draw
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.repeated import Stack, deepen, shallow, stack_of
from shardwise.plan.forecast.work import StepWork
from shardwise.plan.units.wrap import automatic
from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Decoder

BLOCKS = 14
EACH_ALONE = automatic(joined_nbytes=0)


def decoder(layers: int = BLOCKS, tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        config = ModelConfig(layers=layers, width=64, heads=4, kv_heads=2, hidden=96, tied=tied)
        return Decoder(config, 300, 32)


def observed(model: nn.Module, every: int) -> StepWork:
    policy = ActivationCheckpointing(every=every) if every else None
    units = draw(model, wrap=EACH_ALONE).units
    return observe(model, units, (torch.zeros(2, 32, dtype=torch.int64),), {}, policy)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.prove)])
@pytest.mark.parametrize("every", [0, 1, pytest.param(2, marks=pytest.mark.prove), 3])
def test_the_work_of_all_blocks_is_that_of_a_few(every: int, tied: bool) -> None:
    model = decoder(tied=tied)
    stack = stack_of(model, max(1, every))
    assert stack is not None
    few = observed(shallow(model, stack, stack.kept), every)
    assert deepen(few, stack, BLOCKS) == observed(model, every)


def test_the_model_stays_as_it_is_and_ties_are_kept() -> None:
    model = decoder(tied=True)
    stack = stack_of(model)
    assert stack == Stack("model.layers", BLOCKS)
    small = shallow(model, stack, 3)
    assert len(model.get_submodule("model.layers")._modules) == BLOCKS
    assert len(small.get_submodule("model.layers")._modules) == 3
    tied = [name for name, _ in small.named_parameters(remove_duplicate=False)]
    assert len(tied) == len(list(small.parameters())) + 1


def test_blocks_that_differ_are_no_stack() -> None:
    with torch.device("meta"):
        widths = [8, 8, 8, 8, 9, 8, 8, 8, 8, 8]
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(width, width) for width in widths)
    assert stack_of(model) is None


def test_few_blocks_are_observed_as_they_are() -> None:
    assert stack_of(decoder(layers=4)) is None
