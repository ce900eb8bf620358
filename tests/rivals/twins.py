"""A sharded model on rank threads beside its plain twin, for programs in other libraries' style.

A *program* is one step: a function of the model, this rank's batch, and what has ``no_sync()``.
The twin runs each rank's batch and steps with the mean of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import clones, seeded
from tests.parity.plain import mean_in_rank_order, put_gradients
from tests.parity.sharded import off
from tests.ranks import run_threads

Build = Callable[[], nn.Module]
Program = Callable[[nn.Module, Tensor, Any], None]

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
TOLERANCE = {"SGD": 1e-5, "Adam": 2e-5}


class Unsynced:
    """A stand-in for a handle: a plain model has nothing to leave out."""

    def no_sync(self) -> Any:
        return nullcontext()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


def once(model: nn.Module, x: Tensor, _: Any) -> None:
    """The step that everybody expects."""
    model(x).square().mean().backward()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def blocks() -> nn.Module:
    """Units of different sizes, with rows that no number of ranks divides."""
    return nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3))


def plainly(
    build: Build, program: Program, world: int, steps: int, optimizer: Any
) -> dict[str, Tensor]:
    """The state of the twin after these steps."""
    model = seeded(build)
    stepping = optimizer(p for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        parts = []
        for rank in range(world):
            program(model, batch(step, rank), Unsynced())
            parts.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad()
        put_gradients(model, mean_in_rank_order(parts))
        stepping.step()
        stepping.zero_grad()
    return clones(model.state_dict())


def trains_alike(
    build: Build = blocks,
    program: Program = once,
    *,
    world: int = 2,
    steps: int = 3,
    optimizer: Any = SGD,
    strategies: Iterable[str] = ("full_shard", "shard_grad_op", "no_shard"),
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Sharded by each strategy, the model has its twin's values after some steps."""
    expected = plainly(build, program, world, steps, optimizer)
    for strategy in strategies:
        models = [seeded(build) for _ in range(world)]

        def rank(
            comm: Comm, strategy: str = strategy, models: list[nn.Module] = models
        ) -> dict[str, Tensor]:
            model = models[comm.rank]
            sharded = sw.shard(model, strategy, comm=comm, **options)
            stepping = optimizer(p for p in model.parameters() if p.requires_grad)
            for step in range(steps):
                program(model, batch(step, comm.rank), sharded)
                stepping.step()
                stepping.zero_grad()
            return clones(model.state_dict())

        for state in run_threads(world, rank):
            assert off(state, expected, tolerance) == {}, strategy


def on_two(
    run: Callable[[Comm, nn.Module], Any], build: Build = blocks, world: int = 2
) -> list[Any]:
    """``run(comm, model)`` on rank threads, each with the same values."""
    models = [seeded(build) for _ in range(world)]
    return run_threads(world, lambda comm: run(comm, models[comm.rank]))
