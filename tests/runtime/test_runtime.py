"""What runs is what is printed; what was not foreseen is served, and known the next time.

Every step below is held against plain processes, bit for bit (``tests.steps.play``): gradients,
nothing left gathered, all ranks alike, and as many collectives as events.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from time import sleep
from types import FrameType
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm, Label
from shardwise.plan.schedule.events import Event, Mode, Op, Phase
from tests.fake import FakeComm
from tests.nets import NETS, Batch, Net, decoder, decoder_batch, loss, numbers
from tests.parity.plain import mean_in_rank_order
from tests.ranks import run_sharing, run_threads
from tests.steps import (
    STRATEGIES,
    Recorder,
    Step,
    assert_at_rest,
    assert_gradients,
    averaged,
    play,
    train,
    units_of,
)
from tests.watched import Late, Watched


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Chain(nn.Module):
    """Three layers and a head; ``path`` says which layers run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.path: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.path:
            x = self.layers[number](x)
        out: Tensor = self.head(x)
        return out


def chain_batch(seed: int) -> Batch:
    return numbers(seed, (3, 6)), numbers(seed + 50, (3, 2))


BATCHES = [chain_batch(0), chain_batch(1)]


def chain(model: nn.Module) -> Chain:
    assert isinstance(model, Chain)
    return model


def along(*path: int) -> Step:
    """A step through these layers."""

    def step(model: nn.Module, batch: Batch) -> None:
        chain(model).path, before = path, chain(model).path
        train(model, batch)
        chain(model).path = before

    return step


# ---- what runs is what is printed --------------------------------------------------------------


def one_of(mode: Mode, sharded: sw.Sharded, batch: Batch) -> None:
    """A step in ``mode``; the last of two micro-batches comes after the first."""
    if mode == "forward":
        with torch.no_grad():
            loss(sharded.model, batch)
    elif mode == "train":
        train(sharded.model, batch)
    else:
        with sharded.accumulate(last=mode == "last"):
            train(sharded.model, batch)


def rounds(comm: Comm, model: nn.Module, batch: Batch, strategy: str) -> dict[Mode, bool]:
    """After each mode has run once: does what runs equal what is printed?"""
    sharded = sw.shard(model, strategy, comm=comm)
    recorder, equal = Recorder(sharded), {}
    comm.counters.reset()
    for again in (False, True):
        for mode in ("train", "accumulate", "last", "forward"):
            listed = sharded.schedule_of(mode).events
            one_of(mode, sharded, batch)
            equal[mode] = recorder.take() == listed or not again
    return equal


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_in_every_mode_what_runs_is_what_is_printed(net: Net, strategy: str) -> None:
    models = [net.build() for _ in range(2)]
    for equal in run_threads(
        2, lambda comm: rounds(comm, models[comm.rank], net.batch(comm.rank, 2), strategy)
    ):
        assert equal == {"train": True, "accumulate": True, "last": True, "forward": True}


def test_calls_that_share_their_input_end_in_one_order_on_every_rank() -> None:
    """Six shells around a layer, all with the same input: the inner one ends first."""
    model: nn.Module = nn.Linear(6, 6)
    for _ in range(6):
        model = Shell(model)
    model = nn.Sequential(nn.Linear(6, 6), model, nn.Linear(6, 2))
    wrap = sw.wrap.by_class(Shell, nn.Linear)
    taken = play(model, [train] * 3, BATCHES, wrap=wrap)
    assert taken[1].follows
    ends = units_of([event for event in taken[2].done if event.phase is Phase.BACKWARD], Op.EXIT)
    assert ends == ["2", *("1" + ".inner" * depth for depth in range(6, -1, -1)), "0"]


class Shell(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.full((6,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.bias * x
        return out


# ---- steps that nobody foresaw -----------------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> None:
    (loss(model, batch) + loss(model, batch)).backward()


def a_layer_alone(model: nn.Module, batch: Batch) -> None:
    chain(model).layers[1](batch[0]).sum().backward()


def a_layer_then_another(model: nn.Module, batch: Batch) -> None:
    chain(model).head(chain(model).layers[1](batch[0])).sum().backward()


def a_layer_then_the_model(model: nn.Module, batch: Batch) -> None:
    train(model, (chain(model).layers[1](batch[0]), batch[1]))


def part_by_part(model: nn.Module, batch: Batch) -> None:
    """One layer's backward pass before the other's, by hand."""
    first = chain(model).layers[0](batch[0])
    middle = first.detach().requires_grad_()
    chain(model).layers[1](middle).sum().backward()
    first.backward(middle.grad)


def a_forward_that_is_kept(model: nn.Module, batch: Batch) -> None:
    kept = loss(model, batch)
    train(model, batch)
    del kept


def gradient_of_the_input(model: nn.Module, batch: Batch) -> None:
    x = batch[0].clone().requires_grad_()
    train(model, (x, batch[1]))
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


KNOWN_THE_NEXT_TIME: dict[str, Step] = {
    "a skipped branch": along(0, 2),
    "a unit entered twice in a row": along(0, 1, 1, 2),
    "a unit entered again later": along(0, 1, 0, 2),
    "another order": along(2, 1, 0),
    "only the head": along(),
    "two forwards before one backward": two_forwards,
    "a layer called directly": a_layer_alone,
    "one layer called after another": a_layer_then_another,
    "a layer called before the model": a_layer_then_the_model,
    "a forward whose graph is kept": a_forward_that_is_kept,
    "the gradient of an input": gradient_of_the_input,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", KNOWN_THE_NEXT_TIME)
def test_a_step_that_deviates_is_served_and_known_the_next_time(name: str, strategy: str) -> None:
    step = KNOWN_THE_NEXT_TIME[name]
    steps = [train, step, step, train, train]
    taken = play(Chain(), steps, BATCHES, strategy=strategy)
    assert [taken[number].follows for number in (0, 2, 4)] == [True, True, True]
    assert not taken[2].on_demand


def evaluation_before(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        loss(model, batch)
    train(model, batch)


def inference_before(model: nn.Module, batch: Batch) -> None:
    with torch.inference_mode():
        loss(model, batch)
    train(model, batch)


def evaluation_between(model: nn.Module, batch: Batch) -> None:
    value = loss(model, batch)
    with torch.no_grad():
        loss(model, batch)
    value.backward()


def inference_between(model: nn.Module, batch: Batch) -> None:
    value = loss(model, batch)
    with torch.inference_mode():
        loss(model, batch)
    value.backward()


def a_forward_that_is_thrown_away(model: nn.Module, batch: Batch) -> None:
    loss(model, batch)
    train(model, batch)


def two_backwards(model: nn.Module, batch: Batch) -> None:
    value = loss(model, batch)
    value.backward(retain_graph=True)
    value.backward()


def gradients_asked_for_first(model: nn.Module, batch: Batch) -> None:
    x = batch[0].clone().requires_grad_()
    value = loss(model, (x, batch[1]))
    torch.autograd.grad(value, x, retain_graph=True)
    value.backward()


def both_forwards_then_both_backwards(model: nn.Module, batch: Batch) -> None:
    first, second = loss(model, batch), loss(model, batch)
    first.backward()
    second.backward()


def both_forwards_then_both_backwards_reversed(model: nn.Module, batch: Batch) -> None:
    first, second = loss(model, batch), loss(model, batch)
    second.backward()
    first.backward()


def an_evaluation_that_raises_between(model: nn.Module, batch: Batch) -> None:
    value = loss(model, batch)
    handle = chain(model).layers[1].get_submodule("fc").register_forward_pre_hook(stop)
    with torch.no_grad(), pytest.raises(Stop):
        loss(model, batch)
    handle.remove()
    value.backward()


def backward_again_after_it_stopped(model: nn.Module, batch: Batch) -> None:
    x = chain(model).layers[0](batch[0])
    value = chain(model).head(chain(model).layers[1](x)).sum()
    handle = x.register_hook(stop)
    with pytest.raises(Stop):
        value.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    value.backward()


def an_evaluation_inside_backward(model: nn.Module, batch: Batch) -> None:
    def evaluate(gradient: Tensor) -> None:
        with torch.no_grad():
            loss(model, batch)

    x = chain(model).layers[0](batch[0])
    x.register_hook(evaluate)
    (chain(model).head(x).sum() + loss(model, batch)).backward()


SERVED: dict[str, Step] = {
    "evaluation before": evaluation_before,
    "inference mode before": inference_before,
    "evaluation between forward and backward": evaluation_between,
    "inference mode between forward and backward": inference_between,
    "a forward without backward": a_forward_that_is_thrown_away,
    "a second backward": two_backwards,
    "autograd.grad before backward": gradients_asked_for_first,
    "forward, forward, backward, backward": both_forwards_then_both_backwards,
    "the same, last in first out": both_forwards_then_both_backwards_reversed,
    "part by part": part_by_part,
    "an evaluation that raises between": an_evaluation_that_raises_between,
    "backward again after it stopped": backward_again_after_it_stopped,
    "an evaluation inside backward": an_evaluation_inside_backward,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SERVED)
def test_what_no_schedule_lists_is_served_every_time(name: str, strategy: str) -> None:
    step = SERVED[name]
    taken = play(Chain(), [train, step, step, train, train], BATCHES, strategy=strategy)
    assert taken[0].follows
    assert taken[4].follows


def test_a_gradient_that_comes_while_its_bucket_travels_waits_for_it_and_is_added() -> None:
    sharded = sw.shard(Chain(), comm=FakeComm(0, 2))
    recorder = Recorder(sharded)
    reduced_twice(sharded)
    ops = [event.op for event in recorder.events if event.unit == "head"]
    assert ops == [Op.GATHER, Op.REDUCE, Op.SETTLE, Op.REDUCE, Op.SETTLE, Op.FREE]
    grad = sharded.model.get_parameter("head.weight").grad
    assert grad is not None
    assert torch.equal(grad, torch.full_like(grad, 3.0))


def reduced_twice(sharded: sw.Sharded) -> None:
    """A backward pass in which gradients of 2 come after those of 1 were sent."""
    runtime, state = sharded.runtime, sharded.runtime.units["head"]
    [bucket] = state.buckets
    runtime.begin_backward(recorded=False)
    runtime.serve("head", Phase.BACKWARD, "by hand")
    for value in (1.0, 2.0):
        for index, slot in enumerate(bucket.layout.slots):
            runtime.expect_late(state, bucket, index)
            bucket.gradients.collect(index, torch.full(slot.shape, value), carried=False)
        runtime._carry_out([Event(Op.REDUCE, "head", Phase.BACKWARD)])
    runtime.end_backward(kept=False)


def test_a_mean_that_peers_still_read_is_not_added_to() -> None:
    """Over shared memory a copy reads another one's part of the mean where that has put it."""

    def rank(comm: Comm) -> Tensor:
        sharded = sw.shard(Chain(), "no_shard", comm=comm)
        if comm.rank == 1:
            reads_late(comm)
        reduced_twice(sharded)
        return sharded.model.get_parameter("head.weight").grad.clone()  # type: ignore[union-attr]

    for grad in run_sharing(2, rank):
        assert torch.equal(grad, torch.full_like(grad, 3.0))


def reads_late(comm: Any) -> None:
    """Read what peers have sent a while after they have gone on."""
    issue = comm._all_gather

    def all_gather(*args: Any) -> Any:
        transfer = issue(*args)

        def finish() -> None:
            sleep(0.02)
            transfer.finish()

        return transfer._replace(finish=finish)

    comm._all_gather = all_gather


# ---- the order changes -------------------------------------------------------------------------


def test_a_changed_order_is_said_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        play(Chain(), [train, along(0, 2), train, along(2, 0), train], BATCHES)
    [message] = caplog.messages
    assert message.startswith("the order of units changed in step 2 (train)")
    assert "prefetch=sw.Prefetch(forward=0, backward=0)" in message


def test_a_second_backward_pass_through_one_graph_changes_no_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(comm: Comm) -> None:
        sharded = sw.shard(Chain(), comm=comm)
        before = dict(sharded.runtime.schedules.orders)
        for _ in range(2):
            value = loss(sharded.model, BATCHES[comm.rank])
            value.backward(retain_graph=True)
            value.backward()
        assert sharded.runtime.schedules.orders == before

    with caplog.at_level(logging.WARNING, "shardwise"):
        run_threads(2, rank)
    assert caplog.messages == []


def test_a_wrong_first_guess_is_corrected_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        taken = play(Chain(), [along(2, 1, 0)] * 3, BATCHES)
    assert [step.follows for step in taken] == [False, True, True]
    assert caplog.messages == []


@pytest.mark.parametrize("rank", [0, 1])
def test_of_all_ranks_rank_0_says_so(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    sharded = sw.shard(Chain(), comm=FakeComm(rank, 2))
    with caplog.at_level(logging.WARNING, "shardwise"):
        for step in (train, along(0, 2)):
            step(sharded.model, BATCHES[0])
    assert len(caplog.messages) == (rank == 0)


def test_an_evaluation_along_another_path_is_known_the_next_time() -> None:
    sharded = sw.shard(Chain(), comm=FakeComm(0, 2))
    chain(sharded.model).path = (2, 0)
    recorder, follows = Recorder(sharded), []
    for _ in range(2):
        recorder.events.clear()
        listed = sharded.schedule_of("forward").events
        with torch.no_grad():
            loss(sharded.model, BATCHES[0])
        follows.append(tuple(recorder.events) == listed)
    assert follows == [False, True]


# ---- steps that stop half-way ------------------------------------------------------------------


class Stop(RuntimeError):
    """Raised on purpose."""


def stopping_in_forward(model: nn.Module, batch: Batch) -> None:
    handle = chain(model).layers[1].get_submodule("fc").register_forward_pre_hook(stop)
    try:
        with pytest.raises(Stop):
            train(model, batch)
    finally:
        handle.remove()


def stopping_in_backward(model: nn.Module, batch: Batch) -> None:
    x = chain(model).layers[0](batch[0])
    x.register_hook(stop)
    with pytest.raises(Stop):
        chain(model).head(chain(model).layers[1](x)).sum().backward()


def stop(*_: object) -> None:
    raise Stop


STOPS = {"forward": stopping_in_forward, "backward": stopping_in_backward}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", STOPS)
def test_after_an_exception_the_next_step_is_right_and_the_stopped_one_forgotten(
    where: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    models = [Chain()]
    models.append(deepcopy(models[0]))
    truth = averaged(models[0], train, BATCHES)

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        batch = BATCHES[comm.rank]
        recorder, listed = Recorder(sharded), sharded.schedule.events
        for _ in range(2):
            STOPS[where](sharded.model, batch)
            recorder.events.clear()
            comm.counters.reset()
            train(sharded.model, batch)
            assert recorder.take() == listed
            assert_gradients(sharded.model, truth)
            assert_at_rest(sharded)
            sharded.model.zero_grad()

    with caplog.at_level(logging.WARNING, "shardwise"):
        run_threads(2, rank)
    assert caplog.messages == [WARNED[where]] * 4


WARNED = {
    "forward": "a forward pass raised an exception: parameters and gradients are as before it",
    "backward": "a backward pass stopped before its end: parameters are as before it, without "
    "gradients that were not averaged",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_micro_batches_from_before_a_stopped_forward_pass_are_kept(
    stop: type[BaseException], strategy: str
) -> None:
    """As the plain ``.grad`` is, where a batch that was too large is left out."""

    def step(model: nn.Module, batch: Batch) -> None:
        def fail(*_: object) -> None:
            raise stop

        sharded = handles.get(model)
        with sharded.no_sync() if sharded else nullcontext():
            train(model, batch)
        handle = chain(model).layers[1].get_submodule("fc").register_forward_pre_hook(fail)
        with pytest.raises(stop):
            train(model, batch)
        handle.remove()
        train(model, batch)

    handles: dict[nn.Module, sw.Sharded] = {}
    models = [Chain()]
    models.append(deepcopy(models[0]))
    truth = averaged(models[0], step, BATCHES)

    def rank(comm: Comm) -> None:
        sharded = handles[models[comm.rank]] = sw.shard(models[comm.rank], strategy, comm=comm)
        step(sharded.model, BATCHES[comm.rank])
        assert_gradients(sharded.model, truth)
        assert_at_rest(sharded)

    run_threads(2, rank)


class Interrupt:
    """Ctrl-C at the ``number``-th time that a function of the engine begins or ends."""

    def __init__(self, number: int) -> None:
        self.number, self.names = number, list[str]()

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return") or "shardwise" not in frame.f_code.co_filename:
            return
        if frame.f_code.co_name == "<genexpr>":  # what is raised in one that is closed is lost
            return
        self.names.append(frame.f_code.co_name)
        if len(self.names) == self.number:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_anywhere_in_a_step_leaves_the_model_between_steps(strategy: str) -> None:
    """At once, while the traceback is still there: a notebook keeps it."""
    sharded = sw.shard(Chain(), strategy, comm=FakeComm(0, 2))
    model, batch = sharded.model, BATCHES[0]
    before = deepcopy(model.state_dict())
    train(model, batch)
    truth = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    with Interrupt(0) as whole:
        train(model, batch)
    names = whole.names
    ends = [at for at, name in enumerate(names, 1) if name == "_end"]  # which a traceback holds
    for number in [*range(1, len(names), len(names) // 16), *ends]:
        model.zero_grad()
        with pytest.raises(KeyboardInterrupt) as caught, Interrupt(number):
            train(model, batch)
        model.zero_grad()
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
        assert_at_rest(sharded)
        train(model, batch)
        for param, grad in zip(model.parameters(), truth, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, grad)
        del caught


def test_after_ctrl_c_in_a_forward_pass_a_shard_is_read_as_a_shard() -> None:
    """In the pass it would be gathered, by all ranks alike."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    sharded = sw.shard(Chain(), comm=FakeComm(0, 2))
    model, last = chain(sharded.model), sharded.model.get_parameter("head.weight")
    model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, BATCHES[0])
    with pytest.raises(sw.ShardUseError, match=r"'head\.weight' is sharded"), torch.no_grad():
        last.cumsum(0)
    assert_at_rest(sharded)


@pytest.mark.parametrize(
    ("strategy", "run"), [*((name, run_threads) for name in STRATEGIES), ("zero1", run_sharing)]
)
@pytest.mark.parametrize("where", STOPS)
def test_a_stopped_step_shows_shards_and_their_gradients_at_once(
    where: str, strategy: str, run: Callable[..., object]
) -> None:
    """Before the handle is used again: what the user's handler drops is not there later."""
    models = [Chain()]
    models.append(deepcopy(models[0]))
    truth = averaged(models[0], train, BATCHES)

    def rank(comm: Comm) -> None:
        model = sw.shard(models[comm.rank], strategy, comm=comm).model
        at_rest = [(type(param), param.shape) for param in model.parameters()]
        train(model, BATCHES[comm.rank])
        STOPS[where](model, BATCHES[comm.rank])
        assert [(type(param), param.shape) for param in model.parameters()] == at_rest
        assert_gradients(model, truth)
        model.zero_grad()
        train(model, BATCHES[comm.rank])
        assert_gradients(model, truth)

    run(2, rank)


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_a_model_that_catches_a_layers_exception_goes_on(kind: type[BaseException]) -> None:
    def stop(*_: object) -> None:
        raise kind

    def step(model: nn.Module, batch: Batch) -> None:
        handle = chain(model).layers[1].get_submodule("fc").register_forward_pre_hook(stop)
        x = chain(model).layers[0](batch[0])
        try:
            x = chain(model).layers[1](x)
        except kind:
            handle.remove()
        chain(model).head(chain(model).layers[2](x)).sum().backward()

    taken = play(Chain(), [step] * 3 + [train] * 2, BATCHES)
    assert taken[4].follows


class Forgiving(Chain):
    """Catches inside its own forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x[:, :5])
            except RuntimeError:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


def test_a_unit_that_fails_and_is_called_again_in_one_forward_pass_is_served() -> None:
    taken = play(Forgiving(), [train] * 3, BATCHES)
    assert taken[2].follows


class Interrupted(Layer):
    """A layer that Ctrl-C interrupts at every other call, of which torch tells no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            raise KeyboardInterrupt
        return super().forward(x)


class Unmoved(Chain):
    """Catches that inside its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Interrupted()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
            except KeyboardInterrupt:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


def test_so_is_one_that_is_interrupted_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    taken = play(Unmoved(), [train] * 3, BATCHES, wrap=sw.wrap.by_class(Layer))
    assert taken[2].follows
    assert caplog.messages == []  # no pass has stopped


# ---- shared parameters are written when nobody reads them ----------------------------------------


class Fenced(FakeComm):
    """Remembers where every rank would wait for the others."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.fences: list[str] = []

    def fence(self, label: Label) -> None:
        self.fences.append(str(label))


def test_ranks_wait_for_each_other_before_shared_parameters_are_written() -> None:
    comm, model = Late(0, 2), decoder()
    *inputs, _ = batch = decoder_batch(0, 2)
    sw.shard(model, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm.fences.clear()
    optimizer.step()
    assert comm.fences == []
    with torch.no_grad():
        model(*inputs)
    assert comm.fences == ["fence forward"]
    train(model, batch)
    optimizer.step()  # every rank has said by now which gradients it has
    assert comm.fences == ["fence forward"]
    model(*inputs)
    optimizer.step()
    assert comm.fences == ["fence forward"] * 2
    optimizer.step()
    assert comm.fences == ["fence forward"] * 2
    model(*inputs)
    next(model.parameters()).data.mul_(0.5)
    assert comm.fences == ["fence forward"] * 2 + ["fence written"]


@pytest.mark.parametrize("trainable", [True, False])
def test_new_values_wait_for_a_backward_pass_that_ended_without_a_collective(
    trainable: bool,
) -> None:
    """Where a gradient is summed, every rank has answered by the end of the backward pass."""
    comm, model = Fenced(), Chain().requires_grad_(trainable)
    values = deepcopy(model.state_dict())
    sw.shard(model, comm=comm)
    model(BATCHES[0][0].clone().requires_grad_()).sum().backward()
    model.load_state_dict(values)
    assert len(comm.fences) == (0 if trainable else 1)


# ---- evaluation on one rank ----------------------------------------------------------------------


@pytest.mark.parametrize("run", [run_threads, run_sharing])
def test_a_rank_that_has_every_value_may_evaluate_alone(run: Callable[..., list[Any]]) -> None:
    """As programs of DDP do; the next steps are those of ranks that did not."""
    models = [Chain()]
    models += deepcopy(models)
    expected = averaged(models[0], train, BATCHES[:2])

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, "no_shard", comm=comm)
        for _ in range(2):
            train(model, BATCHES[comm.rank])
            assert_gradients(model, expected)
            model.zero_grad()
            if comm.rank == 0:
                with torch.no_grad():
                    model(BATCHES[0][0])
                    model.eval()(BATCHES[1][0])
                    model.train()

    run(2, rank)


@pytest.mark.parametrize("strategy", ["zero1", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("run", [run_threads, run_sharing])
def test_elsewhere_every_rank_says_at_once_that_they_differ(
    run: Callable[..., list[Any]], strategy: str
) -> None:
    """And not after a time-out."""
    models = [Chain()]
    models += deepcopy(models)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train(model, BATCHES[comm.rank])
            optimizer.step()
            optimizer.zero_grad()
            if comm.rank == 0:
                with torch.no_grad():
                    model(BATCHES[0][0])

    with pytest.raises(sw.RanksDisagree, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
        run(2, rank, timeout=30.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", [run_threads, run_sharing])
@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (0.0, "parameters [(]"),
        (0.2, r"parameters, after 1 × SGD.step\(\) with lr 0.2, 0.1 "),
        (torch.tensor(0.2), r"parameters, after 1 × SGD.step\(\) with lr 0.2, 0.1 "),
    ],
    ids=["skipped", "another_rate", "another_tensor"],
)
def test_a_rank_that_updates_otherwise_than_others_is_named_in_the_next_step(
    run: Callable[..., list[Any]], strategy: str, rate: float | Tensor, message: str
) -> None:
    """A loss that one rank alone leaves out, or a scheduler that looks at the rank's own loss."""
    models = [Chain(), Chain()]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for step in range(3):
            train(model, BATCHES[comm.rank])
            if comm.rank == step == 1:
                optimizer.param_groups[0]["lr"] = rate
            if optimizer.param_groups[0]["lr"]:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(sw.RanksDisagree, match="rank 1 is at agree used " + message) as error:
        run(2, rank, timeout=30.0)
    assert "parameters, after 1 × SGD.step() with lr 0.1 (" in str(error.value)


def test_what_one_rank_alone_called_is_named_with_its_line() -> None:
    models = [Chain(), Chain()]

    def rank(comm: Comm) -> None:
        sw.shard(models[comm.rank], comm=comm)
        if comm.rank == 0:
            models[comm.rank].state_dict()
        models[comm.rank](BATCHES[0][0])

    with pytest.raises(sw.RanksDisagree) as error:
        run_sharing(2, rank)
    text = r"rank 0: `models\[comm.rank\].state_dict\(\)` at test_runtime.py:\d+; rank 1: `models"
    assert re.search(f"Look at {text}", str(error.value)), error.value


# ---- parameters that are not used --------------------------------------------------------------


class Choosy(nn.Module):
    """Uses ``extra`` only where the batch says so; ``never`` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)
        self.extra = nn.Linear(6, 2)
        self.never = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out + self.extra(x) if x[0, 0] > 0 else out


def signed(batch: Batch, sign: float) -> Batch:
    x = batch[0].clone()
    x[0, 0] = sign
    return x, batch[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, 1.0)])
def test_a_parameter_used_on_one_rank_only_is_averaged_with_zeros_and_on_none_stays_none(
    signs: tuple[float, float], strategy: str
) -> None:
    batches = [signed(batch, sign) for batch, sign in zip(BATCHES, signs, strict=True)]
    model = Choosy()
    truth = averaged(model, train, batches)
    assert truth["never.weight"] is None
    assert (truth["extra.weight"] is None) == (max(signs) < 0)
    play(model, [train] * 2, batches, strategy=strategy, wrap=sw.wrap.whole())


# ---- gathers in flight, and when ---------------------------------------------------------------


def watched_step(prefetch: sw.Prefetch) -> tuple[int, list[str], tuple[Event, ...]]:
    """Most gathers in flight, what happened among computing, and the schedule, in a third step."""
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> tuple[int, list[str], tuple[Event, ...]]:
        watched = Watched(comm)
        sharded = sw.shard(models[comm.rank], comm=watched, prefetch=prefetch)
        for _ in range(2):
            train(sharded.model, decoder_batch(comm.rank, 2))
        for number, block in enumerate(sharded.model.get_submodule("blocks").children()):
            say = partial(watched.log.append, f"compute blocks.{number}")
            block.get_submodule("mlp.up").register_forward_hook(partial(tell, say))
        watched.log.clear()
        watched.most = 0
        value = loss(sharded.model, decoder_batch(comm.rank, 2))
        watched.log.append("backward")
        value.backward()
        assert watched.flying == 0
        return watched.most, watched.log, sharded.schedule.events

    ranks = run_threads(2, rank)
    assert ranks[0] == ranks[1]
    return ranks[0]


def tell(say: Callable[[], None], module: nn.Module, args: object, out: Tensor) -> None:
    """Say so when a gradient comes back to ``out``."""
    out.register_hook(lambda grad: say())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_never_are_more_gathers_in_flight_than_the_limit(limit: int) -> None:
    most, _, _ = watched_step(sw.Prefetch(forward=10**9, backward=10**9, limit=limit))
    assert most == limit


def backward_of(log: list[str]) -> list[str]:
    """What happens to the blocks in the backward pass."""
    return [line for line in log[log.index("backward") :] if "blocks" in line]


def test_backward_pre_gathers_the_next_unit_before_this_ones_gradients() -> None:
    _, log, _ = watched_step(sw.Prefetch(when="pre"))
    assert backward_of(log) == [
        "gather blocks.2",
        "gather blocks.1",
        "compute blocks.2",
        "reduce blocks.2",
        "gather blocks.0",
        "compute blocks.1",
        "reduce blocks.1",
        "compute blocks.0",
        "reduce blocks.0",
    ]


def test_backward_post_gathers_the_next_unit_after_this_ones_gradients_before_its_reduce() -> None:
    _, log, _ = watched_step(sw.Prefetch(when="post"))
    assert backward_of(log) == [
        "gather blocks.2",
        "compute blocks.2",
        "gather blocks.1",
        "reduce blocks.2",
        "compute blocks.1",
        "gather blocks.0",
        "reduce blocks.1",
        "compute blocks.0",
        "reduce blocks.0",
    ]


def test_without_backward_prefetch_a_unit_is_gathered_when_its_turn_comes() -> None:
    _, log, _ = watched_step(sw.Prefetch(backward=0))
    assert backward_of(log) == [
        "gather blocks.2",
        "compute blocks.2",
        "reduce blocks.2",
        "gather blocks.1",
        "compute blocks.1",
        "reduce blocks.1",
        "gather blocks.0",
        "compute blocks.0",
        "reduce blocks.0",
    ]


# ---- ranks that take different branches ----------------------------------------------------------


PATHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one skips the middle": ((0, 1, 2), (0, 2)),
    "one skips the first": ((0, 1, 2), (1, 2)),
    "one skips the last": ((0, 1, 2), (0, 1)),
    "each skips another": ((0, 2), (1, 2)),
    "both skip the same": ((0, 2), (0, 2)),
    "one skips all": ((0, 1, 2), ()),
}


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
@pytest.mark.parametrize("name", PATHS)
def test_branches_inside_a_unit_may_differ_by_rank(name: str, strategy: str) -> None:
    """What a rank skips counts as zeros in the mean."""
    model = Chain()
    paths = PATHS[name]
    parts = []
    for path, batch in zip(paths, BATCHES, strict=True):
        plain = deepcopy(model)
        along(*path)(plain, batch)
        parts.append({key: param.grad for key, param in plain.named_parameters()})
    truth = mean_in_rank_order(parts)
    models = [deepcopy(model), deepcopy(model)]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, sw.wrap.whole(), comm)
        for _ in range(2):
            with torch.no_grad():
                chain(sharded.model).path = paths[comm.rank]
                loss(sharded.model, BATCHES[comm.rank])
            along(*paths[comm.rank])(sharded.model, BATCHES[comm.rank])
            assert_gradients(sharded.model, truth)
            assert_at_rest(sharded)
            sharded.model.zero_grad()
        train(sharded.model, BATCHES[comm.rank])  # and nobody is out of step afterwards

    run_threads(2, rank)
