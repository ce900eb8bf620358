"""Backward passes that are recorded, for a second pass comes through their graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from tests.copies import error_text
from tests.elsewhere import backward_elsewhere, nodes_ahead
from tests.fake import FakeComm
from tests.nets import Batch, numbers
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES, Step, assert_at_rest, averaged, play

BATCHES: list[Batch] = [
    (torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)), torch.zeros(0))
    for rank in range(2)
]
BY_LAYER = sw.wrap.by_class(nn.Linear)


def critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))


class Forces(nn.Module):
    """Predicts an energy, and as forces its slope, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = critic()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum() * self.scale
            (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return -slope


def penalty(model: nn.Module, batch: Batch) -> Tensor:
    """WGAN-GP: how far the slope of a critic is from 1."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    value: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return value


def with_a_penalty(model: nn.Module, batch: Batch) -> None:
    (model(batch[0]).mean() + penalty(model, batch)).backward()


def with_a_penalty_of_its_own(model: nn.Module, batch: Batch) -> None:
    """Which comes to parameters first, while they have a gradient already."""
    model(batch[0]).mean().backward()
    penalty(model, batch).backward()


def with_a_penalty_after_a_graph_that_is_freed(model: nn.Module, batch: Batch) -> None:
    """Of linear layers, whose recorded graph does not come back to the first one."""
    x = batch[0].clone().requires_grad_()
    value = model(x).sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True, retain_graph=False)
    slope.square().sum().backward()


def with_a_gradient_before_a_graph_that_is_freed(model: nn.Module, batch: Batch) -> None:
    """Autograd comes to parameters first, which have the gradients of their shards."""
    model(batch[0]).mean().backward()
    with_a_penalty_after_a_graph_that_is_freed(model, batch)


def with_a_penalty_beside_a_frozen_layer(model: nn.Module, batch: Batch) -> None:
    model.get_submodule("2").requires_grad_(requires_grad=False)
    with_a_penalty_of_its_own(model, batch)


def with_a_penalty_that_is_used_twice(model: nn.Module, batch: Batch) -> None:
    value = penalty(model, batch)
    value.backward(retain_graph=True)
    (model(batch[0]).mean() + value).backward()


def with_a_penalty_that_is_only_measured(model: nn.Module, batch: Batch) -> None:
    penalty(model, batch)
    model(batch[0]).mean().backward()


def with_an_evaluation_between(model: nn.Module, batch: Batch) -> None:
    value = penalty(model, batch)
    with torch.no_grad():
        model(batch[0])
    value.backward()


def of_forces(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        start = batch[0] + model.eval()(batch[0])
    model.train()(start).square().mean().backward()


STEPS: dict[Step, Callable[[], nn.Module]] = {
    with_a_penalty_of_its_own: critic,
    with_a_penalty_after_a_graph_that_is_freed: linear,
    with_a_gradient_before_a_graph_that_is_freed: linear,
    with_a_penalty_beside_a_frozen_layer: critic,
    with_a_penalty_that_is_used_twice: critic,
    with_a_penalty_that_is_only_measured: critic,
    with_an_evaluation_between: critic,
    of_forces: Forces,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_penalty_is_trained_bit_for_bit(strategy: str) -> None:
    play(critic(), [with_a_penalty] * 3, BATCHES, strategy=strategy, wrap=BY_LAYER)


@pytest.mark.parametrize("offload", ["optimizer", "everything"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_is_one_of_parameters_that_lie_in_host_memory(strategy: str, offload: str) -> None:
    options = {"strategy": strategy, "offload": offload}
    play(critic(), [with_a_penalty] * 3, BATCHES, wrap=BY_LAYER, **options)


@pytest.mark.parametrize(
    ("strategy", "run"),
    [*((name, run_threads) for name in STRATEGIES), ("full_shard", run_sharing)],
)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_units_stay_whole_for_the_graph_of_a_recorded_backward_pass(
    step: Step, strategy: str, run: Callable[..., object]
) -> None:
    check_gradients(step, strategy, 2, run)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_so_they_do_in_a_model_with_copies(step: Step, strategy: str) -> None:
    check_gradients(step, strategy, 4, run_threads, mesh=(2, 2))


def check_gradients(
    step: Step, strategy: str, world: int, run: Callable[..., object], **options: Any
) -> None:
    """Compare the gradients of two steps with those of plain copies."""
    models = [STEPS[step]() for _ in range(world)]
    batches = [BATCHES[rank % 2] for rank in range(world)]
    truth = averaged(models[0], step, batches)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, BY_LAYER, comm, **options)
        for _ in range(2):
            step(model, batches[comm.rank])
            assert not any(param._backward_hooks for param in model.parameters())
            with sharded.full_params():
                for name, param in model.named_parameters():
                    torch.testing.assert_close(param.grad, truth[name])
            model.zero_grad()
        if run is run_threads:
            assert_at_rest(sharded)

    run(world, rank)


def alone(strategy: str = "full_shard") -> sw.Sharded:
    return sw.shard(critic(), strategy, BY_LAYER, FakeComm(0, 2))


def test_a_forward_call_is_expected_until_autograd_has_come_back_through_it() -> None:
    sharded = alone()
    calls = sharded._hooks.backward.calls
    output = sharded.model(BATCHES[0][0])
    assert [calls.expects(unit) for unit in ("0", "2", "4")] == [True] * 3
    output.sum().backward()
    assert [calls.expects(unit) for unit in ("0", "2", "4")] == [False] * 3


def test_what_autograd_would_hand_out_is_refused_also_where_parameters_are_whole() -> None:
    sharded = alone("shard_grad_op")
    value, weight = sharded.model(BATCHES[0][0]).sum(), sharded.model.get_parameter("0.weight")
    text = error_text(sw.ShardUseError, lambda: torch.autograd.grad(value, weight))
    assert text.startswith("torch.autograd.grad was called for the gradient of parameter")
    assert_at_rest(sharded)
    sharded.model(BATCHES[0][0]).sum().backward()
    assert weight.grad is not None
    assert_at_rest(sharded)


def test_one_rank_alone_is_handed_out_gradients_where_many_are() -> None:
    """That is inside ``full_params()``."""
    model = critic()
    expected = torch.autograd.grad(model(BATCHES[0][0]).sum(), list(model.parameters()))
    sharded = sw.shard(model, comm=LocalComm())
    params = list(model.parameters())
    error_text(sw.ShardUseError, lambda: torch.autograd.grad(model(BATCHES[0][0]).sum(), params))
    with sharded.full_params():
        gradients = torch.autograd.grad(model(BATCHES[0][0]).sum(), params)
    assert all(map(torch.equal, gradients, expected))


def test_a_graph_that_is_never_used_keeps_nothing_after_a_step() -> None:
    sharded = alone()
    penalty(sharded.model, BATCHES[0])
    assert all(bucket.gathered for bucket in sharded.buckets)
    torch.optim.SGD(sharded.model.parameters(), lr=0.1).step()
    assert_at_rest(sharded)
    sharded.model(BATCHES[0][0])
    assert not any(bucket.gathered for bucket in sharded.buckets[:-1])  # freed after each use


def test_nor_does_it_keep_a_hook_when_the_model_is_plain_again() -> None:
    sharded = alone()
    penalty(sharded.model, BATCHES[0])
    assert all(param._backward_hooks for param in sharded.model.parameters())
    params = list(sharded.unshard().parameters())
    assert not any(param._backward_hooks for param in params)


BEFORE = "backward() of a forward pass from before unshard() or relayout() would read parameters"


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("full_params", "backward() inside full_params() would leave unsharded gradients"),
        ("unshard", BEFORE),
        ("relayout", BEFORE),
    ],
)
def test_the_graph_of_a_forward_pass_is_of_its_shards(then: str, words: str, strategy: str) -> None:
    def rank(comm: Comm) -> None:
        model = critic()
        sharded = sw.shard(model, strategy, comm=comm)
        value = model(BATCHES[0][0]).sum()
        with ExitStack() as stack:
            if then == "full_params":
                stack.enter_context(sharded.full_params())
            else:
                getattr(sharded, then)()
            assert error_text(sw.ScheduleError, value.backward).startswith(words)
        model(BATCHES[0][0]).sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    run_threads(2, rank)


def test_a_gradient_with_a_graph_of_its_own_is_refused() -> None:
    sharded = alone()
    value = sharded.model(BATCHES[0][0]).sum()
    text = error_text(sw.ScheduleError, lambda: value.backward(create_graph=True))
    assert "carries a graph (create_graph=True)" in text
    assert all(param.grad is None for param in sharded.model.parameters())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast("Tensor", self.down(torch.tanh(self.up(x))))


class Recomputed(nn.Module):
    """Blocks in reentrant checkpoints, whose inputs are made of the root's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = (nn.Parameter(torch.full((4,), n)) for n in (1.0, 2.0))
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x * self.between, use_reentrant=True))
        return x * self.between


@pytest.mark.parametrize(
    "ahead", [7, 11, 14, *(pytest.param(n, marks=pytest.mark.prove) for n in range(64))]
)
def test_a_recomputation_in_another_thread_leaves_no_unit_early(ahead: int) -> None:
    """Its nodes are numbered by that thread, from wherever it is."""

    def step(model: nn.Module, batch: Batch) -> None:
        nodes_ahead(ahead)
        model(batch[0].clone().requires_grad_() * 1.0).square().mean().backward()

    with backward_elsewhere():
        taken = play(Recomputed(), [step] * 2, [(numbers(rank, (2, 4)),) for rank in range(2)])
    assert all(one.follows for one in taken)


class Recording(nn.Linear):
    """Records what its process does while it computes."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__(4, 4)
        self.answers = answers
        self.ask: Callable[[], str] = str

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append(self.ask())
        y = super().forward(x)
        y.register_hook(lambda _: self.answers.append(self.ask()))
        return y * 1.0


def test_a_rank_that_is_asked_names_the_step_the_half_and_the_unit() -> None:
    def rank(comm: Comm) -> list[str]:
        answers = list[str]()
        layer = Recording(answers)
        model = nn.Sequential(nn.Linear(4, 4), layer)
        runtime = sw.shard(model, wrap=BY_LAYER, comm=comm).runtime
        layer.ask = runtime.activity
        answers.append(runtime.activity())
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        return [*answers, runtime.activity()]

    first, second = run_threads(2, rank)
    assert first == second
    steps = [f"step {step}: {half} of 1" for step in (1, 2) for half in ("forward", "backward")]
    assert first == ["", *steps, "after step 2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_pass_may_be_for_some_parameters(strategy: str) -> None:
    """As where a generator's loss is not to reach its critic."""

    def step(model: nn.Module, batch: Batch) -> None:
        value = model(batch[0]).square().sum()
        value.backward(inputs=[*model.get_submodule("2").parameters()])

    play(critic(), [step] * 3, BATCHES, strategy=strategy, wrap=BY_LAYER)
