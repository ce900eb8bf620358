from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.torch_internals import disable_torch_function
from tests.copies import assert_near, clones

X = torch.linspace(-1, 1, 20).reshape(4, 5)


class Gain(nn.Module):
    """A parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.gain) * x.tanh()


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), Gain(), nn.Linear(7, 3))
    with torch.no_grad():
        for param in net.parameters():  # ranks are threads, and have one generator
            param.copy_(torch.linspace(0, 9, param.numel()).sin().view_as(param))
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object]) -> None:
    for _ in range(3):
        net(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def expected() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and averages of one plain process, by torch's own class."""
    net = model()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, lambda: averaged.update_parameters(net))
    return clones(net.state_dict()), clones(averaged.module.state_dict())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_averages_are_those_of_one_process_and_training_goes_on_from_the_weights(
    strategy: str, world: int
) -> None:
    def run(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        net = model()
        sw.shard(net, strategy, comm=comm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        ema = sw.optim.EMA(optimizer, 0.8)
        with ema.applied():  # nothing is averaged yet
            net(X)
        train(net, optimizer, ema.update)
        with ema.applied():
            averages = clones(net.state_dict())
        return clones(net.state_dict()), averages

    for result in threads.run(world, run):
        for got, wanted in zip(result, expected(), strict=True):
            assert_near(got, wanted, 2e-5)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_full"])
def test_a_forward_pass_without_a_backward_one_is_not_in_the_way(strategy: str) -> None:
    """Units are left gathered then, and an average is of shards."""

    def run(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        net, mesh = model(), (2, 2) if strategy == "hybrid_full" else None
        sw.shard(net, strategy, comm=comm, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        ema = sw.optim.EMA(optimizer, 0.8)
        train(net, optimizer, lambda: (net(X), ema.update()))
        net(X)
        with ema.applied():
            averages = clones(net.state_dict())
            net(X)
        return clones(net.state_dict()), averages

    for result in threads.run(4, run):
        for got, wanted in zip(result, expected(), strict=True):
            assert_near(got, wanted, 2e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_averages_are_in_checkpoints_at_any_number_of_ranks(tmp_path: Path, flat: bool) -> None:
    def run(comm: Comm, steps: int) -> dict[str, Tensor]:
        net = model()
        sharded = sw.shard(net, comm=comm)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        if flat:
            optimizer = sw.optim.AdamW(sharded, lr=0.1)
        ema = sw.optim.EMA(optimizer, 0.8)
        if steps:
            train(net, optimizer, ema.update)
            sharded.save(tmp_path / "step-3", optimizer)
        else:
            sharded.load(tmp_path / "step-3", optimizer)
        with ema.applied():
            return clones(net.state_dict())

    saved = threads.run(2, lambda comm: run(comm, 3))[0]
    for loaded in threads.run(3, lambda comm: run(comm, 0)):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_an_average_of_bfloat16_is_as_exact_as_one_of_float32() -> None:
    def run(comm: Comm) -> None:
        net = nn.Linear(5, 4, bias=False, dtype=torch.bfloat16)
        sharded = sw.shard(net, comm=comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        ema, expected = sw.optim.EMA(optimizer, 0.999), torch.ones(())
        net(X.bfloat16()).sum().backward()
        optimizer.step()
        for value in [1.0] + 30 * [2.0]:
            nn.init.constant_(net.weight, value)
            ema.update()
            expected.lerp_(torch.tensor(value), 1e-3)
            with ema.applied():
                pass
        with ema.applied(), sharded.full_params():
            assert abs(float(net.weight.detach().mean()) - float(expected)) < 4e-3
        assert bool((sharded.local_state_dict()["weight"] == 2.0).all())

    threads.run(2, run)


@pytest.mark.parametrize("by_state_dict", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_an_average_of_bfloat16_goes_on(tmp_path: Path, flat: bool, by_state_dict: bool) -> None:
    """Loaded, it was bfloat16: what a step added was rounded away, or the step failed."""

    def run(comm: Comm) -> None:
        net = model().bfloat16()
        sharded = sw.shard(net, comm=comm)

        def new_optimizer() -> torch.optim.Optimizer:
            return sw.optim.AdamW(sharded) if flat else torch.optim.AdamW(net.parameters())

        def step(optimizer: torch.optim.Optimizer) -> list[Tensor]:
            net(X.bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sw.optim.EMA(optimizer, 0.999).update()
            return [optimizer.state[param]["ema"] for param in net.parameters()]

        first, second = new_optimizer(), new_optimizer()
        step(first)
        sharded.save(tmp_path / "step-1", first)
        expected = step(first)
        if by_state_dict:
            second.load_state_dict(first.state_dict())
            assert all(average.dtype is torch.float32 for average in step(second))
            return
        sharded.load(tmp_path / "step-1", second)
        for average, wanted in zip(step(second), expected, strict=True):
            assert average.dtype is torch.float32
            with disable_torch_function():
                assert torch.equal(average, wanted)

    threads.run(2, run)


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_lies_between_0_and_1(decay: float) -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    with pytest.raises(ConfigError, match="it must lie in"):
        sw.optim.EMA(optimizer, decay)
