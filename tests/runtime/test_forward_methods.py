"""Methods other than forward: once registered, they train as they do in a plain model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, func, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.fake import FakeComm
from tests.nets import Batch, Block, numbers
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES, assert_at_rest, assert_gradients, averaged

Module = TypeVar("Module", bound=nn.Module)
WIDTH = 8
BATCHES: list[Batch] = [(numbers(rank, (2, 3, WIDTH)),) for rank in range(2)]


def twins(build: Callable[[], Module]) -> list[Module]:
    """A model for each of two ranks, of the same values."""
    model = build()
    return [model, deepcopy(model)]


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
    models = twins(Autoencoder)
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
    models = twins(Autoencoder)
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


class Parts(nn.Module):
    """Their parameters are the root's, which is whole between the forward pass and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(numbers(5, (WIDTH, WIDTH)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x).tanh()
        return out


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return given[0] * given[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


def times(x: Tensor, weight: Tensor) -> Tensor:
    return cast("Tensor", Times.apply(x, weight))  # type: ignore[no-untyped-call]


def write(x: Tensor, to: Callable[[Tensor], object]) -> Tensor:
    out = x.clone()
    to(out)
    return out


READS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "a module": lambda model, x: model.head(x),
    "one whose parameters lie on one rank": lambda model, x: model.norm(x),
    "a scalar": lambda model, x: x * model.scale,
    "a view": lambda model, x: x @ model.head.weight.T,
    "a view of what is frozen": lambda model, x: x @ model.frozen.T.contiguous(),
    "a function of the user's own": lambda model, x: times(x, model.norm.weight),
    "one that is given a view": lambda model, x: times(x, model.head.weight[1]),
    "what writes to a part": lambda model, x: write(x, lambda out: out[0].mul_(model.scale)),
    "items": lambda model, x: write(x, lambda out: out.__setitem__(0, model.norm.bias)),
    "several": lambda model, x: torch.cat([model.norm.weight, model.norm.bias]).outer(x[0, 0]),
}


def one_loss_after_the_other(model: Parts, x: Tensor, read: Callable[..., Tensor]) -> None:
    losses = model(x).square().sum(), read(model, x).square().sum()
    losses[0].backward()
    if losses[1].requires_grad:
        losses[1].backward()


def one_graph_twice(model: Parts, x: Tensor, read: Callable[..., Tensor]) -> None:
    loss = read(model, model(x)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def between_two_passes(model: Parts, x: Tensor, read: Callable[..., Tensor]) -> None:
    model(read(model, model(x))).square().sum().backward()


@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("train", [one_loss_after_the_other, one_graph_twice, between_two_passes])
def test_what_was_read_while_its_unit_was_whole_is_whole_again_for_its_backward_pass(
    train: Callable[..., None], read: str, run: Callable[..., object]
) -> None:
    """One rank raised torch's error for its shard while others went on, or waited."""
    models = twins(Parts)
    truth = averaged(models[0], lambda model, batch: train(model, *batch, READS[read]), BATCHES)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, comm=comm)
        train(model, *BATCHES[comm.rank], READS[read])
        assert_gradients(model, truth)
        assert_at_rest(sharded)

    run(2, rank)


@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize("read", READS)
def test_so_is_what_was_read_after_a_backward_pass_that_was_not_reduced(
    read: str, run: Callable[..., object]
) -> None:
    """Its unit stays whole for the next micro-batch."""
    models = twins(Parts)

    def step(model: nn.Module, batch: Batch, accumulate: Callable[..., Any]) -> None:
        (x,) = batch
        with accumulate(last=False):
            model(x).square().sum().backward()
            out = READS[read](cast("Parts", model), x).square().sum()
        with accumulate(last=True):
            model(x + out).square().sum().backward()

    def plain(model: nn.Module, batch: Batch) -> None:
        step(model, batch, lambda last: nullcontext())

    truth = averaged(models[0], plain, BATCHES)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, comm=comm, strategy="shard_grad_op")
        step(model, BATCHES[comm.rank], sharded.accumulate)
        assert_gradients(model, truth)
        assert_at_rest(sharded)

    run(2, rank)


TRANSFORMS: dict[str, Callable[[Parts, Tensor], object]] = {
    "vmap": lambda model, x: func.vmap(model.head)(x),
    "vmap over rows": lambda model, x: func.vmap(lambda row: row @ x[0, 0])(model.head.weight),
    "vmap and a view": lambda model, x: func.vmap(lambda row: row @ model.head.weight.T)(x),
    "grad": lambda model, x: func.grad(lambda scale: (x * scale).sum())(model.scale),
    "grad by a view": lambda model, x: func.grad(lambda w: (x @ w).sum())(model.head.weight.T),
    "grad by inputs": lambda model, x: func.grad(lambda x: (x * model.scale).sum())(x),
    "jacrev": lambda model, x: func.jacrev(lambda x: x * model.norm.weight)(x[0, 0]),
    "vjp": lambda model, x: func.vjp(lambda scale: x * scale, model.scale),
    "values of no graph": lambda model, x: func.vmap(torch.no_grad()(model.head))(x),
}


@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_read_no_parameter_between_passes_as_they_read_none_between_steps(
    transform: str, run: Callable[..., object]
) -> None:
    """Ranks raised errors of torch that differed, or the process died."""
    models = twins(Parts)
    truth = averaged(models[0], by_forward, BATCHES)

    def rank(comm: Comm) -> None:
        model, (x,) = models[comm.rank], BATCHES[comm.rank]
        sharded = sw.shard(model, comm=comm)
        loss = model(x).square().mean()
        with pytest.raises(sw.ShardUseError, match=r"transform of torch\.func.*full_params\(\)"):
            TRANSFORMS[transform](model, x)
        loss.backward()  # nothing is broken by it
        assert_gradients(model, truth)
        assert_at_rest(sharded)
        with sharded.full_params():
            TRANSFORMS[transform](model, x)

    run(2, rank)


def test_a_transform_may_ask_what_a_parameter_is() -> None:
    model = Parts()
    sw.shard(model, comm=FakeComm(0, 2))
    model(*BATCHES[0])
    func.vmap(lambda x: x.to(model.scale.dtype).view(model.head.weight.shape[0]))(BATCHES[0][0][0])


VIEWS: dict[str, Callable[[Parts], Tensor]] = {
    "detach()": lambda model: model.scale.detach(),
    "data": lambda model: model.norm.weight.data,
    "a view": lambda model: model.head.weight.T,
    "a view without a graph": torch.no_grad()(lambda model: model.head.weight[1]),
    "a view of a view": lambda model: model.head.weight.detach()[1:],
}
USES: tuple[Callable[[Tensor], object], ...] = (
    torch.sum,
    torch.no_grad()(lambda view: view.mul_(2)),
    lambda view: view.tolist(),
)


@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_whole_parameter_is_one_until_its_unit_is_sharded(
    view: str, use: Callable[[Tensor], object], run: Callable[..., object]
) -> None:
    """In shared memory it had the values of a step before, for good; else torch's error, or none.

    What wrote to memory that is gone ended the process.
    """
    models = [Parts() for _ in range(2)]

    def rank(comm: Comm) -> None:
        model, (x,) = models[comm.rank], BATCHES[comm.rank]
        sw.shard(model, comm=comm)
        loss = model(x).square().mean()
        kept = VIEWS[view](model)
        copied = deepcopy(kept.detach())
        assert torch.equal(copied, kept)
        loss.backward()
        assert type(copied) is Tensor
        use(copied)
        with pytest.raises(sw.ShardUseError, match=r"of a view that was read before.*full_params"):
            use(kept)

    run(2, rank)


@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", VIEWS)
def test_nor_is_it_one_after_unshard(
    view: str, use: Callable[[Tensor], object], run: Callable[..., object]
) -> None:
    """It ended the process; in shared memory it had the values of then, for good."""
    models = [Parts() for _ in range(2)]

    def rank(comm: Comm) -> None:
        model, (x,) = models[comm.rank], BATCHES[comm.rank]
        sharded = sw.shard(model, comm=comm)
        model(x)
        kept = VIEWS[view](model)
        sharded.unshard()
        with pytest.raises(sw.ShardUseError, match=r"or that unshard\(\) moved: read it again"):
            use(kept)
        use(VIEWS[view](model).detach())

    run(2, rank)


def test_a_view_that_a_model_keeps_does_not_keep_the_model() -> None:
    """It lasted until the process ended, with all of its memory."""
    model = Parts()
    sharded = sw.shard(model, comm=FakeComm(0, 2))
    model(*BATCHES[0])
    model.kept = model.scale.detach()
    alive = weakref.ref(model)
    del model, sharded
    gc.collect()
    assert alive() is None


def test_a_row_may_be_written_where_nothing_is_recorded() -> None:
    models = twins(Parts)

    def step(model: nn.Module, batch: Batch) -> None:
        loss = model(*batch).square().mean()
        with torch.no_grad():
            model.get_parameter("head.weight")[1].mul_(2)
        loss.backward()

    truth = averaged(models[0], step, BATCHES)
    doubled = models[0].head.weight[1].detach() * 2

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], comm=comm)
        step(models[comm.rank], BATCHES[comm.rank])
        assert_gradients(models[comm.rank], truth)
        with sharded.full_params():
            assert torch.equal(models[comm.rank].head.weight[1], doubled)

    run_threads(2, rank)


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
