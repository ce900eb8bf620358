"""Parameters read in the forward pass beside their unit, and values put in by ``.data``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import clones, error_text
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES, assert_at_rest, assert_gradients

RUNS = {"messages": run_threads, "memory": run_sharing}
both = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)

# ---- read in the model's forward ----------------------------------------------------------------

Read = Callable[[Any, Tensor], Tensor]

READS: dict[str, Read] = {
    "matmul": lambda m, x: x @ m.embed.weight.T,
    "linear": lambda m, x: F.linear(x, m.embed.weight),
    "penalty": lambda m, x: x @ m.head + m.blocks[0].weight.pow(2).sum(),
    "checkpointed": lambda m, x: checkpoint(m.tied, x, use_reentrant=False),
    "ahead": lambda m, x: (x * m.blocks[1].bias) @ m.head,
    "detach": lambda m, x: x @ m.embed.weight.detach().T,
    "data": lambda m, x: x @ m.embed.weight.data.T,
    "shape": lambda m, x: x @ m.head * m.embed.weight.shape[0] + m.embed.weight.numel(),
}
UNRECORDED: dict[str, Read] = {
    "float": lambda m, x: x.double() @ m.embed.weight.double().T,
    "clone": lambda m, x: x @ m.embed.weight.clone().T,
    "scaled": lambda m, x: x @ (2 * m.embed.weight).T,
}


class Reading(nn.Module):
    """Reads a parameter of one of its units outside that unit's call, as ``read`` says."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Parameter(torch.randn(6, 11))

    def tied(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_parameter("embed.weight"))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.read(self, x)


def steps(model: nn.Module, ids: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(3):
        value = model(ids).float().square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, clones(model.state_dict())


@pytest.mark.parametrize(
    ("read", "run"), [*((read, "messages") for read in READS), ("matmul", "memory")]
)
def test_a_parameter_that_the_forward_reads_beside_its_unit_is_whole(read: str, run: str) -> None:
    """In every strategy, for the forward and the backward pass."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 10]])
    torch.manual_seed(0)
    plain = Reading(READS[read])
    models = {s: [copy.deepcopy(plain) for _ in range(2)] for s in STRATEGIES}
    losses, state = steps(plain, ids)

    def rank(comm: Comm) -> None:
        for strategy in STRATEGIES:
            model = models[strategy][comm.rank]
            sharded = sw.shard(model, strategy, sw.wrap.by_class(nn.Linear, nn.Embedding), comm)
            mine, whole = steps(model, ids)  # the same on every rank: the mean is exact
            assert mine == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(whole, state)
            assert_at_rest(sharded)

    RUNS[run](2, rank)


def late(model: nn.Module, ids: Tensor) -> None:
    first, second = model(ids).square().mean(), model(ids + 1).square().mean()
    first.backward()
    second.backward()


def retained(model: nn.Module, ids: Tensor) -> None:
    value = model(ids).square().mean()
    value.backward(retain_graph=True)
    value.backward()


def evaluated_between(model: nn.Module, ids: Tensor) -> None:
    value = model(ids).square().mean()
    with torch.no_grad():
        model(ids + 1)
    value.backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", [late, retained, evaluated_between])
@pytest.mark.parametrize("read", ["matmul", "penalty", "ahead"])
def test_what_was_read_is_whole_in_every_backward_pass(
    read: str, step: Callable[[nn.Module, Tensor], None], strategy: str
) -> None:
    """Also in one that is not the first, or comes after an evaluation."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 9]])
    torch.manual_seed(0)
    plain = Reading(READS[read])
    models = [copy.deepcopy(plain) for _ in range(2)]
    step(plain, ids)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, sw.wrap.by_class(nn.Linear, nn.Embedding), comm)
        step(model, ids)
        assert_gradients(model, {name: param.grad for name, param in plain.named_parameters()})

    run_threads(2, rank)


@pytest.mark.parametrize("read", [*UNRECORDED, "matmul", "detach"])
def test_a_parameter_that_an_evaluation_reads_beside_its_unit_is_whole(read: str) -> None:
    ids = torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    plain = Reading((READS | UNRECORDED)[read])
    models = [copy.deepcopy(plain) for _ in range(3)]

    def rank(comm: Comm) -> None:
        sw.shard(models[comm.rank], "full_shard", sw.wrap.by_class(nn.Linear, nn.Embedding), comm)
        with torch.no_grad():
            torch.testing.assert_close(models[comm.rank](ids), plain(ids))
        error_text(sw.ShardUseError, lambda: models[comm.rank].head @ torch.ones(11))

    run_threads(3, rank)


class Following(nn.Module):
    """A target that follows inside the forward pass, as in MoCo: before or after it is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.query = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.how == "data =":
                key.data = key.data * 0.75 + query.data * 0.25
            elif self.how == "data.mul_":
                key.data.mul_(0.75).add_(query.data, alpha=0.25)
            else:
                key.lerp_(query, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        self.follow()
        with torch.no_grad():
            key = self.key(x)
        return F.mse_loss(query, key)


@both
@pytest.mark.parametrize("how", ["data =", "data.mul_", "lerp_"])
def test_a_target_that_follows_inside_the_forward_is_that_of_the_plain_model(
    how: str, run: Callable[..., object]
) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = Following(how)
    models = {s: [copy.deepcopy(plain) for _ in range(2)] for s in STRATEGIES}
    losses, state = steps(plain, x)

    def rank(comm: Comm) -> None:
        for strategy in STRATEGIES:
            model = models[strategy][comm.rank]
            sw.shard(model, strategy, sw.wrap.by_class(nn.Linear), comm)
            mine, whole = steps(model, x)
            assert mine == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(whole, state)

    run(2, rank)


# ---- values put in by .data ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("flat", [True, False])
def test_values_that_were_swapped_out_by_data_can_be_swapped_in_again(
    run: Callable[..., object], world: int, flat: bool
) -> None:
    """``backup = p.data; p.data = other; …; p.data = backup``, as for any parameter."""

    def rank(comm: Comm) -> None:
        for strategy in STRATEGIES:
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
            sharded = sw.shard(model, strategy, comm=comm)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if flat:
                optimizer = sw.optim.AdamW(sharded, lr=0.1)
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            before = clones(model.state_dict())
            backup = [p.data for p in model.parameters()], [p.detach() for p in model.parameters()]
            for param in model.parameters():
                param.data = torch.full_like(param.data, 0.5)
            assert all((v == 0.5).all() for v in sharded.local_state_dict().values())
            with torch.no_grad():
                assert model(torch.zeros(1, 5))[0, 0] == 0.5 + 7 * 0.25
            assert all((value == 0.5).all() for value in model.state_dict().values())
            for again in backup:
                for param, value in zip(model.parameters(), again, strict=True):
                    param.data = value
                torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
            optimizer.step()
            assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])

    if world > 1 or run is run_threads:
        run(world, rank)


REFUSED: dict[str, Read] = {
    "an index": lambda m, x: m.embed.weight.__setitem__(0, 1.0),
    "an output": lambda m, x: torch.mm(x[0].T, x[0], out=m.embed.weight),
    "a draw": lambda m, x: m.embed.weight.normal_(),
}


@pytest.mark.parametrize("write", REFUSED)
def test_what_writes_to_whole_values_is_refused_in_a_pass_too(write: str) -> None:
    def rank(comm: Comm) -> None:
        model = Reading(REFUSED[write])
        sw.shard(model, "full_shard", sw.wrap.by_class(nn.Linear, nn.Embedding), comm)
        with torch.no_grad():
            text = error_text(sw.ShardUseError, lambda: model(torch.tensor([[1, 2, 3]])))
        assert "parameter 'embed.weight' is sharded" in text

    run_threads(2, rank)


def test_fills_of_nn_init_write_shards_and_draws_are_refused() -> None:
    def rank(comm: Comm) -> None:
        model = nn.Linear(5, 7)
        sw.shard(model, comm=comm)
        nn.init.constant_(model.weight, 0.5), nn.init.ones_(model.bias)
        assert (model.state_dict()["weight"] == 0.5).all()
        assert (model.state_dict()["bias"] == 1).all()
        for draw in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_):
            with pytest.raises(sw.ShardUseError, match="To write it, as nn"):
                draw(model.weight)

    run_threads(2, rank)
