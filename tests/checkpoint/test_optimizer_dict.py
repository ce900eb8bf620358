"""Optimizer state by name: that of one plain process, into plain optimizers, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import Make, adamw, steps
from tests.copies import on_ranks, said, seeded
from tests.nets import NETS, Net
from tests.steps import STRATEGIES, train

DECODER, TIED, ODD = NETS[0], NETS[1], NETS[4]

MAKES: dict[str, Make] = {
    "adamw": adamw,
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


def same(one: Any, other: Any) -> bool:
    """The same structure, with the same bits in its tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def plain_run(net: Net, make: Make) -> tuple[nn.Module, Optimizer]:
    """One process, on a batch that every rank has alike: no rank's mean differs from it."""
    model = seeded(net.build)
    optimizer = make(model.parameters())
    for number in range(2):
        train(model, net.batch(number, 2))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def run(sharded: sw.Sharded, net: Net, optimizer: Optimizer) -> None:
    for number in range(2):
        train(sharded.model, net.batch(number, 2))
        optimizer.step()
        optimizer.zero_grad()


def taken(
    net: Net, world: int, make: Make, strategy: str = "full_shard", **how: Any
) -> list[dict[str, Any]]:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(model.parameters())
        run(sharded, net, optimizer)
        return sharded.optimizer_state_dict(optimizer, **how)

    return on_ranks(world, net.build, rank)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_is_that_of_a_single_process(make: Make, strategy: str) -> None:
    # Two ranks with equal batches: their sum halved is the one gradient, bit for bit.
    model, optimizer = plain_run(DECODER, make)
    plain = sw.by_name(optimizer.state_dict(), names_of(model))
    assert all(same(state, plain) for state in taken(DECODER, 2, make, strategy))


@pytest.mark.parametrize("net", [TIED, ODD, NETS[3], NETS[5]], ids=str)
def test_scalars_tied_frozen_and_unused_parameters(net: Net) -> None:
    model, optimizer = plain_run(net, adamw)
    plain = sw.by_name(optimizer.state_dict(), names_of(model))
    state = taken(net, 4, adamw)[2]
    assert state["param_groups"] == plain["param_groups"]
    assert set(plain["state"]) <= set(state["state"])  # an unused one has zeros here
    for name, one in plain["state"].items():
        for key, value in one.items():
            torch.testing.assert_close(state["state"][name][key], value, rtol=1e-4, atol=1e-6)
            assert state["state"][name][key].shape == value.shape


def test_of_rank_0_only_the_others_get_nothing() -> None:
    states = taken(DECODER, 3, adamw, rank0_only=True)
    assert set(states[0]["state"]) == set(names_of(seeded(DECODER.build)))
    assert states[1:] == [{}, {}]


def test_chosen_names_alone() -> None:
    state = taken(DECODER, 2, adamw, names=lambda name: name == "norm.weight")[1]
    assert list(state["state"]) == ["norm.weight"]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_plain_optimizer_loads_it_and_goes_on_alike(make: Make) -> None:
    model, optimizer = plain_run(DECODER, make)
    fresh = make(model.parameters())
    fresh.load_state_dict(sw.numbered(taken(DECODER, 2, make, rank0_only=True)[0]))
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_plain_optimizers_state_goes_to_all_ranks_from_rank_0(make: Make, strategy: str) -> None:
    plain_model, plain = plain_run(DECODER, make)
    given = sw.by_name(plain.state_dict(), names_of(plain_model))

    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(model.parameters())
        sharded.load_optimizer_state_dict(optimizer, given if comm.rank == 0 else {})
        return sharded.optimizer_state_dict(optimizer)

    assert all(same(state, given) for state in on_ranks(3, DECODER.build, rank))


def test_scalar_parameters_go_there_and_back() -> None:
    first = taken(ODD, 4, adamw)[0]

    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, ODD, comm.rank, range(1))  # there is other state already
        sharded.load_optimizer_state_dict(optimizer, first)
        return sharded.optimizer_state_dict(optimizer)

    assert all(same(state, first) for state in on_ranks(3, ODD.build, rank))


def test_pieces_are_joined_and_shards_are_this_ranks() -> None:
    full = taken(DECODER, 3, adamw)[0]["state"]
    pieces = taken(DECODER, 3, adamw, kind="sharded")
    shards = taken(DECODER, 3, adamw, kind="local")
    for key in ("exp_avg", "exp_avg_sq"):
        joined = sw.join([{n: one[key] for n, one in p["state"].items()} for p in pieces])
        assert same(joined, {name: one[key] for name, one in full.items()})
        sizes = [sum(one[key].numel() for one in s["state"].values()) for s in shards]
        assert sum(sizes) == sum(value.numel() for value in joined.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["state"]["norm.bias"].update(exp_avg=torch.zeros(3)), "exp_avg of norm.bias"),
        (lambda s: s["param_groups"][0]["params"].remove("norm.bias"), "norm.bias: its optimizer"),
        (lambda s: s["param_groups"][0]["params"].append("extra"), "extra: stored"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), "Pass by_name"),
    ],
    ids=["shape", "missing", "extra", "numbers"],
)
def test_what_does_not_fit_is_named_on_every_rank(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    model, plain = plain_run(DECODER, adamw)
    given = sw.by_name(plain.state_dict(), names_of(model))
    change(given)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        mine = given if comm.rank == 0 else {}
        text = said(sw.CheckpointError, lambda: sharded.load_optimizer_state_dict(optimizer, mine))
        assert not optimizer.state
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert says in texts[0]
    assert says in texts[1]


def test_as_many_names_as_parameters() -> None:
    _, plain = plain_run(DECODER, adamw)
    with pytest.raises(sw.CheckpointError, match="and 1 names were given"):
        sw.by_name(plain.state_dict(), ["one"])
