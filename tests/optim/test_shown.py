"""However a step ends, parameters are guarded after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.fake import FakeComm
from shardwise.guard import ShardedParameter
from tests import nets
from tests.steps import train


class Stop(RuntimeError):
    """Raised on purpose."""


class Stops(torch.optim.SGD):
    """An optimizer whose own code raises."""

    def step(self, closure: Any = None) -> Any:
        assert {type(param) for param in self.param_groups[0]["params"]} == {nn.Parameter}
        raise Stop


def stop(*_: object) -> None:
    raise Stop


def in_a_hook(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(stop)
    optimizer.step()


def in_a_closure(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step(stop)


def in_the_optimizer(model: nn.Module) -> None:
    Stops(model.parameters(), lr=0.1).step()


def trained() -> sw.Sharded:
    sharded = sw.shard(nets.decoder(), comm=FakeComm(0, 2))
    train(sharded.model, nets.decoder_batch(0, 2))
    assert all(param.grad is not None for param in sharded.model.parameters())  # marked from now on
    return sharded


def kinds(model: nn.Module) -> set[type]:
    return {type(param) for param in model.parameters()}


@pytest.mark.parametrize("stopping", [in_a_hook, in_a_closure, in_the_optimizer])
def test_after_a_step_that_raised_parameters_are_guarded(
    stopping: Callable[[nn.Module], None],
) -> None:
    model = trained().model
    with suppress(Stop):
        stopping(model)
    assert kinds(model) == {ShardedParameter}
    with pytest.raises(sw.ShardUseError):
        next(model.parameters()).cumsum(0)


def test_while_the_exception_is_kept_the_next_forward_pass_guards_them() -> None:
    """A notebook keeps the last one; when it is forgotten is nobody's business."""
    model = trained().model
    with pytest.raises(Stop) as kept:
        in_the_optimizer(model)
    assert kinds(model) == {nn.Parameter}
    train(model, nets.decoder_batch(0, 2))
    del kept
    assert kinds(model) == {ShardedParameter}
