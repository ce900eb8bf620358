"""Parameters that are left alone: whole and plain, beside those that are sharded."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.config.ignored import Ignored
from shardwise.memory.sharding import sharding_of
from tests.copies import clones, error_text, on_ranks, seeded
from tests.nets import numbers
from tests.parity.plain import mean_in_rank_order
from tests.steps import STRATEGIES


class Routed(nn.Module):
    """Layers, a router that each rank trains for itself, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.router = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.router(x) * self.scale
        return x


def objects(model: nn.Module) -> Ignored:
    """The ignored objects as FSDP1 and ``fully_shard`` take them."""
    return [model.get_submodule("router"), model.get_parameter("scale")]


def batch(rank: int) -> Tensor:
    return numbers(rank, (3, 4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ignored_parameters_are_plain_and_their_gradients_this_ranks(strategy: str) -> None:
    plain = [seeded(Routed) for _ in range(2)]
    for number, model in enumerate(plain):
        model(batch(number)).square().sum().backward()
    grads = [{name: p.grad for name, p in model.named_parameters()} for model in plain]
    means = mean_in_rank_order(grads)

    def rank(comm: Comm, model: nn.Module) -> None:
        ignored = objects(model)
        sharded = sw.shard(model, strategy, comm=comm, ignored=ignored)
        model(batch(comm.rank)).square().sum().backward()
        for name, param in model.named_parameters():
            if name.startswith("layers"):
                assert sharding_of(param) is not None
                continue
            assert type(param) is nn.Parameter
            assert sharding_of(param) is None
            assert param.grad is not None
            assert torch.equal(param.grad, grads[comm.rank][name])  # type: ignore[arg-type]
        with sharded.full_params():
            for layer in ("layers.0.weight", "layers.1.bias"):
                grad, mean = model.get_parameter(layer).grad, means[layer]
                assert grad is not None
                assert mean is not None
                torch.testing.assert_close(grad, mean)
        assert {m.name for unit in sharded.units for m in unit.members} == {
            f"layers.{k}.{name}" for k in range(2) for name in ("weight", "bias")
        }

    on_ranks(2, Routed, rank)


def test_state_dicts_and_checkpoints_hold_them_and_a_copy_is_whole(tmp_path: Path) -> None:
    whole = seeded(Routed, seed=1).state_dict()

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, ignored=objects(model))
        sharded.load_state_dict(whole)
        sharded.save(tmp_path / "step-1")
        for state in (sharded.state_dict(), model.state_dict(), deepcopy(model).state_dict()):
            assert all(torch.equal(state[name], value) for name, value in whole.items())
        with torch.no_grad():
            model.get_parameter("scale").zero_()
        sharded.load(tmp_path / "step-1")
        state = clones(model.state_dict())
        assert all(torch.equal(state[name], value) for name, value in whole.items())
        assert model.get_parameter("scale").requires_grad

    on_ranks(2, Routed, rank)


def test_optimizers_and_clipping_step_on_the_others() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, ignored=objects(model))
        before = model.get_parameter("scale").detach().clone()
        flat, other = sw.optim.AdamW(sharded), torch.optim.SGD([model.get_parameter("scale")], 0.1)
        model(batch(comm.rank)).square().sum().backward()
        assert sharded.clip_grad_norm_(1.0) > 0
        flat.step()
        assert torch.equal(model.get_parameter("scale"), before)
        other.step()
        assert not torch.equal(model.get_parameter("scale"), before)
        model(batch(comm.rank))

    on_ranks(2, Routed, rank)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["routers"], "ignored= has 'routers', which is no module.* Nearest are router"),
        ([nn.Linear(1, 1)], "ignored= has a Linear, which is no module"),
        (nn.Linear(1, 1), "ignored is a Linear"),
        ("router", "ignored= is a str"),
    ],
)
def test_what_is_not_in_the_model_is_refused(given: Ignored, says: str) -> None:
    with pytest.raises(sw.ConfigError, match=says):
        sw.shard(seeded(Routed), ignored=given)


def test_a_trace_of_such_a_model_is_refused() -> None:
    model = seeded(Routed)
    text = error_text(sw.ConfigError, lambda: sw.trace(model, batch(0), ignored=["router"]))
    assert "ignored" in text
