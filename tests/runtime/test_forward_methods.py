"""Methods other than forward: once registered, they train as they do in a plain model."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.fake import FakeComm
from tests.nets import Batch, Block, numbers
from tests.ranks import run_threads
from tests.steps import (
    STRATEGIES,
    assert_at_rest,
    assert_gradients,
    averaged,
)

WIDTH = 8
BATCHES: list[Batch] = [(numbers(rank, (2, 3, WIDTH)),) for rank in range(2)]


class Mean(nn.Module):
    """Lies in the root's unit, and has no forward that anybody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.mean = Mean()
        self.decoder = nn.Sequential(*(Block(WIDTH) for _ in range(2)))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        return self.mean.project(x)

    def loss(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.encode(x)) * self.scale
        return (decoded - x).square().mean()

    def fail(self, x: Tensor) -> Tensor:
        raise ArithmeticError(self.encode(x).shape)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x)
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encode(x)) * self.scale
        return out


def by_loss(model: nn.Module, batch: Batch) -> None:
    model.loss(*batch).backward()  # type: ignore[operator]


def by_encode(model: nn.Module, batch: Batch) -> None:
    model.encode(*batch).square().mean().backward()  # type: ignore[operator]


def by_part(model: nn.Module, batch: Batch) -> None:
    model.get_submodule("mean").project(*batch).square().mean().backward()  # type: ignore[operator]


def by_forward(model: nn.Module, batch: Batch) -> None:
    model(*batch).square().mean().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_a_plain_model_bit_for_bit(strategy: str) -> None:
    models = [Autoencoder() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [by_loss, by_encode, by_part, by_forward, by_loss]
    truths = [averaged(models[0], step, BATCHES) for step in steps]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, comm=comm)
        for module, name in ((model, "encode"), (model, "loss"), (model.mean, "project")):
            sharded.register_forward_method(module, name)
        for step, truth in zip(steps, truths, strict=True):
            step(model, BATCHES[comm.rank])
            assert_gradients(model, truth)
            assert_at_rest(sharded)
            model.zero_grad()

    run_threads(2, rank)


def test_a_method_that_calls_the_model_again_and_again_and_one_that_fails() -> None:
    models = [Autoencoder() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    expected = [models[0].generate(*batch) for batch in BATCHES]
    truth = averaged(models[0], by_forward, BATCHES)

    def rank(comm: Comm) -> None:
        model, batch = models[comm.rank], BATCHES[comm.rank]
        sharded = sw.shard(model, comm=comm)
        sharded.register_forward_method(model, "generate")
        sharded.register_forward_method(model, "fail")
        assert torch.equal(model.generate(*batch), expected[comm.rank])
        with pytest.raises(ArithmeticError):
            model.fail(*batch)
        assert_at_rest(sharded)
        by_forward(model, batch)
        assert_gradients(model, truth)
        assert_at_rest(sharded)

    run_threads(2, rank)


def test_a_method_that_is_called_after_ctrl_c_begins_a_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = Autoencoder()
    sharded = sw.shard(model, comm=FakeComm(0, 2))
    sharded.register_forward_method(model, "encode")
    expected = model.encode(*BATCHES[0])
    handle = model.decoder.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(*BATCHES[0])
    handle.remove()
    assert torch.equal(model.encode(*BATCHES[0]), expected)
    [warned] = caplog.messages
    assert warned.startswith("a forward pass stopped before its end")


def test_without_the_registration_the_error_names_it() -> None:
    model = Autoencoder()
    sw.shard(model, comm=FakeComm(0, 2))
    with pytest.raises(sw.ShardUseError, match=r"sharded\.register_forward_method\(module, 'enc"):
        model.encode(*BATCHES[0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.tensor(1.0))

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_pass_that_begins_at_a_shard_of_a_module_without_a_unit_is_refused() -> None:
    """A rank without elements of the scalar took what memory held for its gradient."""

    def train(comm: Comm) -> None:
        part = Scaled()
        sharded = sw.shard(nn.Sequential(part), comm=comm)
        sharded.register_forward_method(part, "encode")
        batch = torch.full((1, 2), 1.0 + comm.rank)
        losses = part.encode(batch).sum(), part(batch).sum()  # whole by accident
        losses[0].backward()
        with pytest.raises(sw.ScheduleError, match=r"'0\.scale' was computed while"):
            losses[1].backward()

    run_threads(2, train)


def test_a_registration_outlasts_relayout_and_ends_with_unshard() -> None:
    model = Autoencoder()
    sharded = sw.shard(model, comm=FakeComm(0, 2))
    sharded.register_forward_method(model, "encode")
    expected = model.encode(*BATCHES[0])
    sharded.relayout()
    assert torch.equal(model.encode(*BATCHES[0]), expected)
    copied = deepcopy(model)
    assert "encode" not in vars(copied)
    assert torch.equal(copied.encode(*BATCHES[0]), expected)
    plain = sharded.unshard()
    assert "encode" not in vars(plain)


def test_what_cannot_be_registered_is_said() -> None:
    sharded = sw.shard(Autoencoder(), comm=FakeComm(0, 2))
    with pytest.raises(sw.ConfigError, match=r"no method 'encod'.*encode"):
        sharded.register_forward_method(sharded.model, "encod")
    with pytest.raises(sw.ConfigError, match="a Linear that is not in the sharded model"):
        sharded.register_forward_method(nn.Linear(2, 2), "forward")


def test_a_method_that_was_put_on_one_object_is_put_back() -> None:
    model = nn.Linear(2, 2)
    encode = model.forward
    model.encode = encode  # type: ignore[assignment]
    sharded = sw.shard(model)
    sharded.register_forward_method(model, "encode")
    assert vars(model)["encode"] is not encode
    sharded.unshard()
    assert vars(model)["encode"] is encode
