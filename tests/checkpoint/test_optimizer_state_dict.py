"""Optimizer state by name: that of one plain process, into plain optimizers, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import Make, adamw
from tests.copies import assert_near, error_text, on_ranks, seeded
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


def states_of(
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
    assert all(same(state, plain) for state in states_of(DECODER, 2, make, strategy))


@pytest.mark.parametrize("net", [TIED, ODD, NETS[3], NETS[5]], ids=str)
def test_scalars_tied_frozen_and_unused_parameters(net: Net) -> None:
    model, optimizer = plain_run(net, adamw)
    plain = sw.by_name(optimizer.state_dict(), names_of(model))
    state = states_of(net, 4, adamw)[2]
    assert state["param_groups"] == plain["param_groups"]
    assert set(plain["state"]) <= set(state["state"])  # an unused one has zeros here
    for name, one in plain["state"].items():
        for key, value in one.items():
            assert_near(state["state"][name][key], value, 1e-4)
            assert state["state"][name][key].shape == value.shape


def test_of_rank_0_only_the_others_get_nothing() -> None:
    states = states_of(DECODER, 3, adamw, rank0_only=True)
    assert set(states[0]["state"]) == set(names_of(seeded(DECODER.build)))
    assert states[1:] == [{}, {}]


def test_chosen_names_alone() -> None:
    state = states_of(DECODER, 2, adamw, names=lambda name: name == "norm.weight")[1]
    assert list(state["state"]) == ["norm.weight"]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_plain_optimizer_loads_it_and_goes_on_alike(make: Make) -> None:
    model, optimizer = plain_run(DECODER, make)
    fresh = make(model.parameters())
    fresh.load_state_dict(sw.numbered(states_of(DECODER, 2, make, rank0_only=True)[0]))
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_plain_optimizers_state_goes_to_all_ranks_from_rank_0(make: Make, strategy: str) -> None:
    plain_model, plain = plain_run(DECODER, make)
    expected = sw.by_name(plain.state_dict(), names_of(plain_model))

    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(model.parameters())
        sharded.load_optimizer_state_dict(optimizer, expected if comm.rank == 0 else {})
        return sharded.optimizer_state_dict(optimizer)

    assert all(same(state, expected) for state in on_ranks(3, DECODER.build, rank))


def test_shards_of_state_know_their_whole() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, optimizer = stepped(comm, model, adamw)
        full, shards, plain = (
            sharded.optimizer_state_dict(optimizer, kind)["state"]
            for kind in ("full", "sharded", "local")
        )
        for name, state in full.items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(shards[name][key].full_tensor(), state[key])
                assert torch.equal(shards[name][key].to_local(), plain[name][key])
                assert type(plain[name][key]) is Tensor
            assert torch.equal(shards[name]["step"], state["step"])

    on_ranks(3, small, rank)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["state"]["norm.bias"].update(exp_avg=torch.zeros(3)), "exp_avg of norm.bias"),
        (lambda s: s["param_groups"][0]["params"].remove("norm.bias"), "norm.bias: its optimizer"),
        (lambda s: s["param_groups"][0]["params"].append("extra"), "extra: stored"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), "Pass sw.by_name"),
    ],
    ids=["shape", "missing", "extra", "numbers"],
)
def test_what_does_not_fit_is_named_on_every_rank(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    model, plain = plain_run(DECODER, adamw)
    state = sw.by_name(plain.state_dict(), names_of(model))
    change(state)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        mine = state if comm.rank == 0 else {}
        text = error_text(
            sw.CheckpointError, lambda: sharded.load_optimizer_state_dict(optimizer, mine)
        )
        assert not optimizer.state
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert says in texts[0]
    assert says in texts[1]


def test_as_many_names_as_parameters() -> None:
    _, plain = plain_run(DECODER, adamw)
    with pytest.raises(sw.CheckpointError, match="and 1 names were given"):
        sw.by_name(plain.state_dict(), ["one"])


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


def stepped(comm: Comm, model: nn.Module, make: Make) -> tuple[sw.Sharded, Optimizer]:
    sharded = sw.shard(model, comm=comm)
    optimizer = make(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return sharded, optimizer


def test_shards_that_do_not_know_their_whole_are_not_loaded() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded, optimizer = stepped(comm, model, adamw)
        before = sharded.optimizer_state_dict(optimizer)
        state = sharded.optimizer_state_dict(optimizer, "local")
        text = error_text(
            sw.CheckpointError, lambda: sharded.load_optimizer_state_dict(optimizer, state)
        )
        assert same(sharded.optimizer_state_dict(optimizer), before)
        return text

    says = "nothing loads one of kind 'local'"
    assert all(says in text for text in on_ranks(2, small, rank))


GROUP = {**torch.optim.AdamW(small().parameters()).param_groups[0]}
NAMES = names_of(small())
GOOD = {"params": NAMES, **{key: GROUP[key] for key in GROUP if key != "params"}}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "rank 0 needs an optimizer state dict"),
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, "rank 0 needs an optimizer state dict"),
        ({"state": {}, "param_groups": [1]}, "rank 0 needs an optimizer state dict"),
        ({"state": [1], "param_groups": [GOOD]}, "rank 0 needs an optimizer state dict"),
        ({"state": {"0.bias": 1}, "param_groups": [GOOD]}, "rank 0 needs an optimizer state dict"),
        ({"state": {"0.bias": {1: 1}}, "param_groups": [GOOD]}, "under the key 1"),
        (
            {"state": {"lost": {"step": torch.ones(())}}, "param_groups": [GOOD]},
            "lost: it has state, and is in no stored group",
        ),
        (
            {"state": {}, "param_groups": [{"params": NAMES, "lr": 0.1, "momentum": 0.9}]},
            "group 0: it has no amsgrad, betas, eps, weight_decay, so it is not of AdamW",
        ),
    ],
    ids=["none", "no params", "no group", "list", "no dict", "key", "lost", "of sgd"],
)
def test_what_is_no_state_of_this_optimizer_is_refused_on_every_rank(state: Any, says: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters())
        mine: Any = state if comm.rank == 0 else None
        return error_text(
            sw.CheckpointError, lambda: sharded.load_optimizer_state_dict(optimizer, mine)
        )

    assert all(says in text for text in on_ranks(2, small, rank))


def test_state_of_sgd_is_not_given_to_adamw() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded, sgd = stepped(comm, model, MAKES["sgd"])
        state, other = sharded.optimizer_state_dict(sgd), adamw(model.parameters())
        text = error_text(
            sw.CheckpointError, lambda: sharded.load_optimizer_state_dict(other, state)
        )
        assert not other.state
        return text

    assert "it has no amsgrad, betas, eps" in on_ranks(2, small, rank)[1]


def test_additions_of_schedulers_and_options_of_later_torch_do_not_matter() -> None:
    def rank(comm: Comm, model: nn.Module) -> float:
        sharded, optimizer = stepped(comm, model, adamw)
        state = sharded.optimizer_state_dict(optimizer)
        state["param_groups"][0].update(initial_lr=0.5, max_lr=1.0, lr=0.25)
        del state["param_groups"][0]["decoupled_weight_decay"]
        sharded.load_optimizer_state_dict(optimizer, state)
        assert optimizer.param_groups[0]["initial_lr"] == 0.5
        return float(optimizer.param_groups[0]["lr"])

    assert on_ranks(2, small, rank) == [0.25, 0.25]


def test_names_that_the_optimizer_keeps_are_its_own() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, optimizer = stepped(comm, model, adamw)
        named: Any = list(model.named_parameters())
        cut = [{"params": named[:1]}, {"params": named[1:]}]
        other = torch.optim.AdamW(cut, lr=1e-2)
        sharded.load_optimizer_state_dict(other, sharded.optimizer_state_dict(optimizer))
        sharded.load_optimizer_state_dict(optimizer, sharded.optimizer_state_dict(other))
        assert "param_names" not in optimizer.param_groups[0]
        assert other.param_groups[0]["param_names"] == ["0.weight"]

    on_ranks(2, small, rank)


class Odd(torch.optim.Optimizer):
    """State of a form of its own, made by what it is given."""

    elementwise = True

    def __init__(self, params: Any, make: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 1.0})
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["sum"] = make(number, param)


def test_state_that_fits_on_some_ranks_alone_is_refused_on_every_rank(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[str, str]:
        sharded = sw.shard(model, comm=comm)
        odd = Odd(model.parameters(), lambda _, p: torch.zeros(p.shape if comm.rank else (1,)))
        return (
            error_text(sw.CheckpointError, lambda: sharded.optimizer_state_dict(odd)),
            error_text(
                sw.CheckpointError, lambda: sharded.save(tmp_path / "a", odd, sw.Training())
            ),
        )

    for texts in on_ranks(2, small, rank):
        assert all("rank 0: optimizer state 'sum' of " in text for text in texts)


def test_each_parameters_state_keeps_its_dtype() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]

    def rank(comm: Comm, model: nn.Module) -> list[torch.dtype]:
        sharded = sw.shard(model, comm=comm)
        odd = Odd(model.parameters(), lambda k, p: torch.full(p.shape, 1 / 3, dtype=dtypes[k]))
        state = sharded.optimizer_state_dict(odd)["state"]
        for k, name in enumerate(NAMES):
            value = state[name]["sum"]
            assert torch.equal(value, torch.full(value.shape, 1 / 3, dtype=dtypes[k]))
        return [state[name]["sum"].dtype for name in NAMES]

    assert on_ranks(2, small, rank) == [dtypes, dtypes]
