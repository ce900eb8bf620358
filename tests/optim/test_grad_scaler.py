"""``torch.amp.GradScaler`` on shards: what overflows on one rank makes every rank skip the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import clones, equal, error_text, local, on_ranks
from tests.steps import STRATEGIES, train

BUILD, BATCH = nets.scalar_and_13_rows, nets.scalar_and_13_rows_batch

OPTIMIZERS: dict[str, Callable[[sw.Sharded], torch.optim.Optimizer]] = {
    "loop": lambda sharded: torch.optim.SGD(sharded.model.parameters(), 0.1, foreach=False),
    "fused": lambda sharded: torch.optim.AdamW(sharded.model.parameters(), 0.1, fused=True),
    "flat": lambda sharded: sw.optim.AdamW(sharded, lr=0.1),
}


def steps(sharded: sw.Sharded, kind: str, overflow: tuple[int, int]) -> list[tuple[float, bool]]:
    """Of each of three steps, the scale after it and whether parameters changed.

    In step ``overflow[0]`` an element of rank ``overflow[1]``'s gradients is not finite.
    """
    optimizer = OPTIMIZERS[kind](sharded)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    results = list[tuple[float, bool]]()
    for step in range(3):
        before = clones(sharded.model.state_dict())
        scaler.scale(nets.loss(sharded.model, BATCH(sharded.comm.rank, 2))).backward()
        if (step, sharded.comm.rank) == overflow:
            largest = max(sharded.model.parameters(), key=lambda p: math.prod(p.shape))
            local(largest.grad).view(-1)[-1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append((scaler.get_scale(), not equal(sharded.model.state_dict(), before)))
    return results


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_rank_skips_the_step_in_which_one_rank_overflows(kind: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[tuple[float, bool]]:
        return steps(sw.shard(model, comm=comm), kind, (1, 2))

    assert on_ranks(3, BUILD, rank) == [[(1024.0, True), (512.0, False), (512.0, True)]] * 3


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_shard", "hybrid_full"])
def test_in_every_strategy_a_backward_pass_that_overflows_on_one_rank_skips_all(
    strategy: str,
) -> None:
    """The copies of a hybrid, too: gradients are averaged before they are unscaled."""

    def rank(comm: Comm, model: nn.Module) -> list[bool]:
        mesh = (2, 2) if strategy.startswith("hybrid") else None
        sharded = sw.shard(model, strategy, comm=comm, mesh=mesh)
        optimizer, skipped = OPTIMIZERS["loop"](sharded), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            value = nets.loss(model, BATCH(comm.rank, 2))
            overflows = (step, comm.rank) == (1, 3)
            scaler.scale(value * torch.inf if overflows else value).backward()
            before = clones(sharded.local_state_dict())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped.append(equal(clones(sharded.local_state_dict()), before))
        assert scaler.get_scale() == 2.0**9
        return skipped

    assert on_ranks(4, BUILD, rank) == [[False, True, False]] * 4


def test_scaled_steps_are_those_without_a_scaler() -> None:
    """In every strategy; a power of two changes no bit."""

    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        scaled = sw.shard(model, strategy, comm=comm)
        plain = sw.shard(nets.scalar_and_13_rows(), strategy, comm=comm)
        plain.model.load_state_dict(model.state_dict())
        steps(scaled, "loop", (-1, 0))
        optimizer = OPTIMIZERS["loop"](plain)
        for _ in range(3):
            train(plain.model, BATCH(comm.rank, 2))
            optimizer.step()
            optimizer.zero_grad()
        assert equal(model.state_dict(), plain.model.state_dict())

    for strategy in STRATEGIES:
        on_ranks(2, BUILD, lambda comm, model: rank(comm, model, strategy))  # noqa: B023


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_scales_that_differ_between_ranks_are_an_error_with_both(strategy: str) -> None:
    """Also those of the two copies of a hybrid, which exchange nothing else after the backward."""

    def rank(comm: Comm, model: nn.Module) -> str:
        mesh = (2, 2) if strategy == "hybrid_shard" else None
        optimizer = OPTIMIZERS["loop"](sw.shard(model, strategy, comm=comm, mesh=mesh))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + comm.rank // 2))
        scaler.scale(nets.loss(model, BATCH(comm.rank, 2))).backward()
        return error_text(sw.RanksDisagree, lambda: scaler.step(optimizer))

    for text in on_ranks(4, BUILD, rank):
        assert text.startswith("a GradScaler has scale 1024 on rank 0 and 2048 on rank 2, so ")


def test_a_scaler_on_some_ranks_only_is_an_error_that_names_it() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        optimizer = OPTIMIZERS["loop"](sw.shard(model, comm=comm))
        scaler = torch.amp.GradScaler("cpu", enabled=comm.rank == 0)
        for _ in range(2):
            scaler.scale(nets.loss(model, BATCH(comm.rank, 2))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(sw.RanksDisagree, match="unscale gradients of a GradScaler"):
        on_ranks(2, BUILD, rank)


def test_a_scaler_costs_one_collective_for_each_dtype() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        scaler, optimizer = torch.amp.GradScaler("cpu"), OPTIMIZERS["loop"](sharded)
        scaler.scale(nets.loss(model, BATCH(comm.rank, 2))).backward()
        comm.counters.reset()
        scaler.unscale_(optimizer)
        assert comm.counters.calls == {"unscale": 1}
        scaler.step(optimizer)
        assert comm.counters.calls == {"unscale": 1}

    on_ranks(2, BUILD, rank)
