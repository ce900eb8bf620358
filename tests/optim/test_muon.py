"""Muon on shards has the bits of torch's Muon on whole matrices, in every placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from tests import nets
from tests.copies import assert_near, clones, equal, error_text, local, on_ranks, seeded
from tests.nets import Net
from tests.steps import STRATEGIES, averaged, train

MUON: dict[str, Any] = {"lr": 0.02}
ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-4}
EXPERTS = Net(nets.unused_expert, nets.unused_expert_batch)
HYBRIDS = [
    *((name, (2, 2)) for name in ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")),
    ("hybrid_shard", (2, 3)),
    ("hybrid_full", (3, 2)),
]


def is_muons(name: str, param: Tensor) -> bool:
    """Decide by names, where the rules look at modules."""
    return param.ndim == 2 and name not in ("embed.weight", "lm_head.weight")


def plain_step(model: nn.Module, **options: Any) -> Callable[[], None]:
    """A step of torch's optimizers on whole parameters."""
    pairs = list(model.named_parameters())
    muon = torch.optim.Muon([p for n, p in pairs if is_muons(n, p)], **{**MUON, **options})
    adamw = torch.optim.AdamW([p for n, p in pairs if not is_muons(n, p)], fused=True, **ADAMW)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def batch(step: int, rank: int) -> nets.Batch:
    return nets.decoder_batch(100 * step + rank, 2)


@cache
def one_process(ranks: Sequence[int], steps: int = 3) -> list[dict[str, Tensor]]:
    """The states of a plain model after each step on the ranks' batches."""
    model, states = seeded(nets.decoder), []
    step = plain_step(model)
    for number in range(steps):
        gradients = averaged(model, train, [batch(number, rank) for rank in ranks])
        for name, param in model.named_parameters():
            param.grad = gradients[name]
        step()
        states.append(clones(model.state_dict()))
    return states


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_ranks_equal_one_process_bit_for_bit(world: int, strategy: str) -> None:
    expected = one_process(range(world))

    def rank(comm: Comm, model: nn.Module) -> list[dict[str, Tensor]]:
        optimizer = sw.optim.Muon(sw.shard(model, strategy, comm=comm), adamw=ADAMW, **MUON)
        states = []
        for number in range(3):
            train(model, batch(number, comm.rank))
            optimizer.step()
            optimizer.zero_grad()
            states.append(clones(model.state_dict()))
        return states

    for states in on_ranks(world, nets.decoder, rank):
        assert all(map(equal, states, expected))


def by_gradients(
    comm: Comm, model: nn.Module, strategy: str, mesh: Any = None, **options: Any
) -> None:
    """Torch's optimizers on a whole copy, with the gradients that the sharded model has."""
    whole = deepcopy(model)
    step = plain_step(whole, **{k: v for k, v in options.items() if k != "max_norm"})
    placed = {} if mesh is None else {"mesh": mesh}
    sharded = sw.shard(model, strategy, comm=comm, **placed)
    optimizer = sw.optim.Muon(sharded, adamw=ADAMW, **{**MUON, **options})
    for number in range(3):
        train(model, batch(number, comm.rank))
        with sharded.full_params():
            for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                other.grad = local(mine.grad).clone()
        optimizer.step()
        if optimizer.norm is not None:
            assert optimizer.norm > options["max_norm"]
            for param in whole.parameters():
                assert param.grad is not None
                param.grad /= (optimizer.norm + 1e-6) / options["max_norm"]
        step()
        optimizer.zero_grad()
        state, expected = model.state_dict(), dict(whole.named_parameters())
        for name, param in expected.items():
            if is_muons(name, param):
                assert torch.equal(state[name], param), name
            assert_near(state[name], param.detach(), 2e-5)


@pytest.mark.prove
@pytest.mark.parametrize(("strategy", "grid"), HYBRIDS)
def test_a_grid_of_ranks_equals_one_process(strategy: str, grid: tuple[int, int]) -> None:
    on_ranks(
        grid[0] * grid[1],
        nets.decoder,
        lambda comm, model: by_gradients(comm, model, strategy, grid),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain momentum": {"nesterov": False, "momentum": 0.8},
    "as AdamW's": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "few steps": {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    "a tensor": {"lr": torch.tensor(0.03), "weight_decay": 0.5},
    "clipped": {"max_norm": 0.05},
}


@pytest.mark.parametrize(
    "options",
    ["few steps", *(pytest.param(n, marks=pytest.mark.prove) for n in OPTIONS if n != "few steps")],
)
def test_its_options_are_torchs(options: str) -> None:
    chosen = OPTIONS[options]
    on_ranks(3, nets.decoder, lambda comm, model: by_gradients(comm, model, "full_shard", **chosen))


def test_what_is_sent_is_what_owners_do_not_hold_twice_in_two_bytes() -> None:
    """The lower bound for these owners: each part once to its owner, and its result once back."""

    def rank(comm: Comm, model: nn.Module) -> tuple[int, int]:
        optimizer = sw.optim.Muon(sw.shard(model, comm=comm), adamw=ADAMW, **MUON)
        train(model, batch(0, comm.rank))
        comm.counters.reset()
        optimizer.step()
        assert comm.counters.calls["orthogonalize"] == 2
        assert optimizer._plan is not None
        exchange = optimizer._plan.exchange
        numel = sum(p.shape[0] * p.shape[1] for p in exchange.matrices)
        at_home = sum(m.held(o) for m, o in zip(exchange.matrices, exchange.owners, strict=True))
        return comm.counters.bytes_sent["orthogonalize"], 2 * 2 * (numel - at_home)

    ranks = on_ranks(3, nets.decoder, rank)
    hidden = 3 * (4 * 16 * 16 + 2 * 35 * 16)
    assert sum(sent for sent, _ in ranks) == ranks[0][1]
    assert 0 < ranks[0][1] < 2 * 2 * hidden * 2 / 3  # less than owners that hold a third would need


def test_where_every_rank_has_all_nothing_is_sent() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        optimizer = sw.optim.Muon(sw.shard(model, "no_shard", comm=comm), **MUON)
        train(model, batch(0, comm.rank))
        comm.counters.reset()
        optimizer.step()
        assert comm.counters.calls == {}

    on_ranks(2, nets.decoder, rank)


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """With one batch for all ranks, so that means over 4, 2 and 1 of them are equal."""
    expected = one_process((0,), steps=6)

    def rank(comm: Comm, model: nn.Module, first: int, strategy: str) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = sw.optim.Muon(sharded, adamw=ADAMW, lr=0.5 if first else 0.02)
        if first:
            sharded.load(tmp_path / str(first), optimizer)
        for number in range(first, first + 2):
            train(model, batch(number, 0))
            optimizer.step()
            optimizer.zero_grad()
        sharded.save(tmp_path / str(first + 2), optimizer)
        return clones(model.state_dict())

    runs = ((0, 4, "full_shard"), (2, 2, "zero1"), (4, 1, "full_shard"))
    for first, world, strategy in runs:
        for state in on_ranks(world, nets.decoder, lambda c, m: rank(c, m, first, strategy)):  # noqa: B023
            assert equal(state, expected[first + 1])


def test_matrices_without_a_gradient_are_left_alone() -> None:
    """An expert that nobody reaches; weight decay does not touch it either."""

    def rank(comm: Comm, model: nn.Module) -> set[str]:
        sharded = sw.shard(model, comm=comm)
        optimizer = sw.optim.Muon(sharded, **MUON)
        before = clones(model.state_dict())
        train(model, EXPERTS.batch(comm.rank, 2))
        without = {name for name, param in model.named_parameters() if param.grad is None}
        optimizer.step()
        after = model.state_dict()
        assert {name for name in before if torch.equal(before[name], after[name])} == without
        return without

    for without in on_ranks(2, EXPERTS.build, rank):
        assert without


def test_a_scheduler_sets_the_rate_of_both_algorithms() -> None:
    sharded = sw.shard(seeded(nets.decoder), comm=LocalComm())
    optimizer = sw.optim.Muon(sharded, adamw={"lr": 0.5}, lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(sharded.model, batch(0, 0))
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]


def test_what_is_no_matrix_or_no_option_is_refused() -> None:
    sharded = sw.shard(seeded(nets.decoder), comm=LocalComm())

    def refused(**options: Any) -> str:
        return error_text(sw.ConfigError, lambda: sw.optim.Muon(sharded, **options))

    assert "parameter 'blocks.0.norm1.weight' of shape (16,) is in a group of Muon" in refused(
        groups=[{"params": r".*norm1\.weight"}]
    )
    assert "algorithm is 'sgd'; choose one of 'muon', 'adamw'." in refused(
        groups=[{"params": ".*", "algorithm": "sgd"}]
    )
    assert "Muon() has no option 'momentun'; nearest is 'momentum'" in refused(momentun=0.9)
    assert "AdamW() has no option 'beta'" in refused(adamw={"beta": 0.9})
    assert "a parameter group has a max_norm" in refused(adamw={"max_norm": 1.0})
    assert "no trainable parameter has a name that 'nope' matches" in refused(
        adamw={"params": "nope"}
    )
    assert "ns_steps is 100; it must be from 1 to 99." in refused(ns_steps=100)
    assert "adjust_lr_fn is 'none'" in refused(adjust_lr_fn="none")
    assert "momentum is -1; it must not be negative" in refused(momentum=-1)
