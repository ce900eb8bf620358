"""What is trained changes between steps, and nothing else changes with it.

Two ranks with equal batches form exact means, so that a plain model is the truth, bit for bit.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import RanksDisagree
from shardwise.plan.schedule.events import Op
from shardwise.plan.units.units import Unit
from shardwise.runtime.trained import ask_used
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.nets import numbers
from tests.ranks import run_threads
from tests.steps import Recorder, assert_at_rest, units_of
from tests.watched import Late

Shard = Callable[[nn.Module], object]
Program = Callable[[nn.Module, Shard], dict[str, Tensor]]


class Chain(nn.Module):
    """Three layers and a head; ``before`` and ``between`` are called with it as it computes."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, outputs)
        self.before: Callable[[Chain], object] = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.before(self)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


X = numbers(0, (4, 6))


def train(model: nn.Module) -> None:
    model(X).square().mean().backward()


def assert_as_plain(program: Program, build: Callable[[], nn.Module], strategy: str) -> None:
    plain = program(seeded(build), lambda model: None)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        return program(model, lambda part: sw.shard(part, strategy, comm=comm))

    for state in on_ranks(2, build, rank):
        assert equal(state, plain)


# --- as a plain model does ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "full_shard"])
def test_what_was_accumulated_before_it_was_frozen_is_kept(strategy: str) -> None:
    def program(model: nn.Module, shard: Shard) -> dict[str, Tensor]:
        handle = shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if isinstance(handle, sw.Sharded):
                with handle.no_sync():
                    train(model)
            else:
                train(model)
            model.get_submodule("layers").requires_grad_(False)
            train(model)
            optimizer.step(), optimizer.zero_grad()
            train(model)  # and only what is trained is reduced from now on
            assert model.get_parameter("layers.0.bias").grad is None
            optimizer.step(), optimizer.zero_grad()
            model.requires_grad_(True)
        return clones(model.state_dict())

    assert_as_plain(program, Chain, strategy)


def frozen_in_forward(model: Chain) -> None:
    model.layers.requires_grad_(False)


def unfrozen_in_forward(model: Chain) -> None:
    model.requires_grad_(True)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("change", [frozen_in_forward, unfrozen_in_forward])
def test_the_model_itself_may_change_it_as_it_computes(
    change: Callable[[Chain], None], strategy: str
) -> None:
    def program(model: nn.Module, shard: Shard) -> dict[str, Tensor]:
        assert isinstance(model, Chain)
        model.layers[0].requires_grad_(change is frozen_in_forward)
        shard(model)
        model.before = change
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model)
            optimizer.step(), optimizer.zero_grad()
        return clones(model.state_dict())

    assert_as_plain(program, Chain, strategy)


# --- what it costs -----------------------------------------------------------------------------


def reduced(recorder: Recorder) -> list[str]:
    return sorted(units_of(recorder.take(), Op.REDUCE))


@pytest.mark.parametrize(
    ("strategy", "fences"), [("no_shard", ["fence gradients"]), ("full_shard", [])]
)
def test_copies_wait_until_each_has_read_the_mean_of_the_others(
    strategy: str, fences: list[str]
) -> None:
    comm, model = Late(0, 3), seeded(Chain)
    sw.shard(model, strategy, comm=comm)
    comm.fences.clear()
    train(model)
    assert comm.fences == fences


@pytest.mark.parametrize("drops", [False, True])
def test_a_frozen_layer_is_reduced_once_more_if_it_had_accumulated_gradients(drops: bool) -> None:
    """Which were not dropped."""
    model = seeded(Chain)
    sharded = sw.shard(model, wrap=sw.wrap.by_class(nn.Linear), comm=Late(0, 2))
    with sharded.accumulate(last=False):
        train(model)
    if drops:
        sharded.drop_gradients()
    model.get_submodule("layers.0").requires_grad_(requires_grad=False)
    recorder, reduced = Recorder(sharded), []
    for _ in range(2):
        recorder.events.clear()
        train(model)
        reduced.append(sorted(units_of(recorder.events, Op.REDUCE)))
    trained = ["head", "layers.1", "layers.2"]
    assert reduced == [trained if drops else sorted([*trained, "layers.0"]), trained]


def test_only_units_with_a_trained_parameter_are_reduced_and_have_memory_for_gradients() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        model.requires_grad_(False)
        sharded = sw.shard(model, comm=comm)
        recorder = Recorder(sharded)
        comm.counters.reset()
        for names in ([], ["head"], ["head", "layers.0"], ["layers.0"]):
            model.requires_grad_(False)
            for name in names:
                model.get_submodule(name).requires_grad_(True)
            model(X.clone().requires_grad_(True)).sum().backward()
            assert reduced(recorder) == names
            assert sorted(unit.name for unit in sharded.units if has_grads(unit)) == names
            assert_at_rest(sharded)
            model.zero_grad()

    def has_grads(unit: Unit) -> bool:
        return all(member.param.grad is not None for member in unit.members)

    on_ranks(2, Chain, rank)


def test_a_kind_of_step_follows_its_schedule_when_it_comes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a change of what is trained is no change of order that would have to be said."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        recorder = Recorder(sharded)
        comm.counters.reset()
        for again, trained in itertools.product((False, True, True), (False, True)):
            for layer in list(model.get_submodule("layers").children())[:2]:
                layer.requires_grad_(trained)
            listed = sharded.schedule.events
            train(model)
            done = recorder.take()
            assert not again or done == sharded.schedule.events
            assert listed is not done

    with caplog.at_level(logging.WARNING, "shardwise"):
        on_ranks(2, Chain, rank)
    assert caplog.messages == []


def test_no_more_than_some_kinds_of_steps_are_kept() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    sharded = sw.shard(model, wrap=sw.wrap.by_class(nn.Linear), comm=LocalComm())
    for trained in itertools.product((False, True), repeat=5):
        for layer, on in zip(model, trained, strict=True):
            layer.requires_grad_(on)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(sharded.runtime.schedules._kinds) == 16


def test_what_changes_only_under_no_grad_is_not_asked_about() -> None:
    """``peft``'s ``disable_adapter()`` around the forward pass of a reference model."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        train(model)
        before = sharded.runtime.schedules.script("train")
        model.requires_grad_(False)
        with torch.no_grad():
            model(X)
        model.requires_grad_(True)
        comm.counters.reset()
        train(model)
        assert comm.counters.calls["agree"] == 1  # as always: which parameters were used
        assert sharded.runtime.schedules.script("train") is before

    on_ranks(2, Chain, rank)


# --- what cannot be ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
@pytest.mark.parametrize(
    ("trained", "names", "what"),
    [
        (False, ("weight", "bias"), "'head.weight' is frozen now, and 1 more changed"),
        (True, ("bias",), "'head.bias' is trained now"),
    ],
)
def test_ranks_that_train_different_parameters_are_told_which(
    trained: bool, names: Sequence[str], what: str
) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        model.get_submodule("head").requires_grad_(not trained)
        sw.shard(model, comm=comm)
        train(model)
        if comm.rank == 1:
            for name in names:
                model.get_parameter(f"head.{name}").requires_grad_(trained)
        return error_text(RanksDisagree, lambda: train(model))

    for text in on_ranks(2, Chain, rank):
        assert f"rank 1 is at agree that {what} [" in text


def test_a_parameter_that_is_stored_in_another_dtype_than_trained_ones_names_relayout() -> None:
    model = Chain().double()
    model.head.requires_grad_(False)
    precision = sw.Precision(stored_dtype=torch.float32, param_dtype=torch.float32)
    sharded = sw.shard(model, comm=LocalComm(), precision=precision)
    model.layers[0].requires_grad_(False)  # to freeze is always possible
    train(model)
    model.head.weight.requires_grad_(True)
    assert error_text(sw.ScheduleError, lambda: train(model)) == (
        "parameter 'head.weight' is trainable now, and was not when the model was sharded: its "
        "bucket is stored in torch.float64, and precision.stored_dtype asks for "
        "torch.float32. Call sharded.relayout() after changing requires_grad."
    )
    sharded.relayout()
    train(model)
    assert {param.dtype for param in model.parameters() if param.grad is not None} == {
        torch.float32
    }


# ---- which had a gradient on any rank -----------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_parameter_is_used_where_any_rank_used_it(world: int) -> None:
    """Rank r used parameter r; nobody used the last one."""

    def rank(comm: Comm) -> list[bool]:
        return ask_used([index == comm.rank for index in range(world + 1)], comm)()

    assert run_threads(world, rank) == [[True] * world + [False]] * world


def test_a_rank_that_used_all_still_answers_the_others() -> None:
    def rank(comm: Comm) -> list[bool]:
        return ask_used([True, comm.rank == 0, comm.rank == 0], comm)()

    assert run_threads(3, rank) == [[True] * 3] * 3


def test_one_rank_alone_and_no_parameters_ask_nobody() -> None:
    comm = LocalComm()
    assert ask_used([True, False], comm)() == [True, False]
    assert (
        run_threads(2, lambda comm: (ask_used([], comm)(), comm.counters.calls)) == [([], {})] * 2
    )
    assert comm.counters.calls == {}


def test_the_answers_of_others_are_read_when_they_have_come() -> None:
    comm = Late(0, 2)
    answer = ask_used([True, False], comm)
    assert comm.waited == [False]
    assert answer() == [True, False]
    assert comm.waited == [True]
