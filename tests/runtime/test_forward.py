"""Where cues come from: whatever a module returns and whatever is done with it afterwards.

Gradients are held against plain processes bit for bit (``tests.steps.play``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.utils.generic import ModelOutput

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.schedule.events import Op, Phase
from tests.copies import error_text, seeded
from tests.fake import FakeComm
from tests.nets import Batch, loss, numbers
from tests.ranks import run_processes, run_threads
from tests.steps import (
    STRATEGIES,
    Recorder,
    Step,
    Taken,
    assert_at_rest,
    assert_gradients,
    averaged,
    play,
    train,
    units_of,
)

BATCHES = [(numbers(rank, (3, 6)), numbers(rank + 50, (3, 2))) for rank in range(2)]


class Layer(nn.Module):
    """``first`` is done to its input, ``last`` to its output."""

    def __init__(self, first: Callable[[Tensor], Tensor], last: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.fc(self.first(x)))


class Chain(nn.Module):
    """Three layers; ``between`` turns what one returns into what the next one takes."""

    def __init__(
        self,
        last: Callable[[Tensor], Any] = torch.tanh,
        between: Callable[[Any], Tensor] = lambda x: x,
        first: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first, last) for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        out: Tensor = self.head(x)
        return out


# ---- what a module returns -----------------------------------------------------------------------


@dataclass
class Packed:
    y: Tensor
    n: int = 3


@dataclass
class Output(ModelOutput):
    y: Tensor | None = None
    z: Tensor | None = None


RETURNED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tuple": (lambda y: (torch.tanh(y), None, 3), lambda out: out[0]),
    "a dict": (lambda y: {"n": 3, "y": torch.tanh(y)}, lambda out: out["y"]),
    "a list in a dict": (lambda y: {"ys": [torch.tanh(y)]}, lambda out: out["ys"][0]),
    "a dataclass": (lambda y: Packed(torch.tanh(y)), lambda out: out.y),
    "a model output": (lambda y: Output(y=torch.tanh(y)), lambda out: out.y),
    "two parts": (lambda y: y.tanh().split(3, -1), lambda out: torch.cat(out, -1)),
    "one of two": (lambda y: (torch.tanh(y), torch.exp(y)), lambda out: out[1]),
    "a view": (lambda y: y.tanh().view(-1).view(-1, 6), lambda out: out),
    "a transposed view": (lambda y: y.tanh().t().t(), lambda out: out),
    "an expanded view": (lambda y: y.tanh().expand(1, -1, -1), lambda out: out[0]),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RETURNED)
def test_a_module_may_return(name: str, strategy: str) -> None:
    last, between = RETURNED[name]
    taken = play(Chain(last, between), [train] * 2, BATCHES, strategy=strategy)
    assert all(step.follows for step in taken)


class Notes(nn.Module):
    """Returns nothing: its output goes into what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, notes: dict[str, Tensor]) -> None:
        notes["y"] = self.fc(notes["x"])


def test_a_module_that_returns_nothing_has_not_failed_where_its_caller_handles_an_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a retry after a lack of memory."""

    def step(model: nn.Module, batch: Batch) -> None:
        notes = {"x": batch[0]}
        try:
            raise MemoryError
        except MemoryError:
            model(notes)
        notes["y"].sum().backward()

    play(Notes(), [step] * 2, BATCHES, strategy="no_shard", wrap=sw.wrap.whole())
    assert caplog.messages == []


KEPT: dict[int, Tensor] = {}


class Opaque:
    """Nobody can know that there is a tensor behind it."""

    def __init__(self, y: Tensor) -> None:
        KEPT[id(self)] = y

    def open(self) -> Tensor:
        return KEPT[id(self)]


class Slots:
    """A tensor in a slot."""

    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def open(self) -> Tensor:
        return self.y


class Scored:
    """A tensor in an attribute, beside one that no loss uses, and itself."""

    def __init__(self, y: Tensor) -> None:
        self.__hidden, self.itself = [y], self

    def open(self) -> Tensor:
        return self.__hidden[0]


class Returns(nn.Module):
    """A model whose output is what ``pack`` makes of a tensor."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.head, self.pack = nn.Linear(6, 5), nn.Linear(5, 2), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.head(torch.relu(self.fc(x))))


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "an object": (Scored, lambda out: out.open()),
    "an object beside a number": (lambda y: (y.mean(), Scored(y)), lambda out: out[1].open()),
    "what hides its tensors": (Opaque, lambda out: out.open()),
    "a dataclass": (Packed, lambda out: out.y),
    "a slot beside a number": (lambda y: (y.mean(), Slots(y)), lambda out: out[1].open()),
    "a method of it": (lambda y: Slots(y).open, lambda out: out()),
    "a closure": (lambda y: lambda: y, lambda out: out()),
    "a default": (lambda y: lambda y=y: y, lambda out: out()),
    "an iterator": (lambda y: iter([y]), next),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [sw.wrap.whole(), sw.wrap.by_class(nn.Linear)], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_a_model_may_return_objects_and_take_several_backward_passes(
    name: str, wrap: sw.wrap.Wrap, strategy: str
) -> None:
    pack, unpack = PACKED[name]

    def twice(model: nn.Module, batch: Batch) -> None:
        for _ in range(2):  # the same, so that sums are exact in any order
            unpack(model(batch[0])).square().sum().backward()

    play(Returns(pack), [twice] * 2, BATCHES, strategy=strategy, wrap=wrap)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_may_return_an_object_beside_a_tensor(strategy: str) -> None:
    model = Chain(lambda y: (y.detach(), Scored(torch.tanh(y))), lambda out: out[1].open())
    taken = play(model, [train] * 3, BATCHES, strategy=strategy)
    assert all(step.follows for step in taken)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_hides_tensors_keeps_its_unit_whole_until_the_step_ends(strategy: str) -> None:
    model = Chain(lambda y: Opaque(torch.tanh(y)), lambda out: out.open())
    taken = play(model, [train] * 3, BATCHES, strategy=strategy)
    released = [e for e in taken[2].done if e.op is Op.FREE and e.unit.startswith("layers")]
    assert {event.phase for event in released} <= {Phase.BACKWARD}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_does_it_through_an_evaluation_before_the_backward_pass(strategy: str) -> None:
    def step(model: nn.Module, batch: Batch) -> None:
        value = loss(model, batch)
        with torch.no_grad():
            model(batch[0])
        value.backward()

    model = Chain(lambda y: Opaque(torch.tanh(y)), lambda out: out.open())
    play(model, [step] * 2, BATCHES, strategy=strategy)


class ReturnsItsWeight(Layer):
    """As heads do that hand out the matrix for another product, and weight-norm layers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.fc(x)), self.fc.weight[0]


class UsesWeights(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturnsItsWeight(lambda x: x, lambda x: x) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for layer in self.layers:
            x, row = layer(x)
            rows.append(row)
        out: Tensor = self.head(x * rows[0] + rows[1] + rows[2])
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_view_of_a_parameter_that_is_returned_stays_valid_outside_its_unit(strategy: str) -> None:
    play(UsesWeights(), [train] * 3, BATCHES, strategy=strategy)


# ---- what is done with it ------------------------------------------------------------------------


def halved(x: Tensor) -> Tensor:
    """A part is changed in place, then seen in another shape."""
    x[:, :3].mul_(0.5)
    return x.view(-1).view(-1, 6)


CHANGED: dict[str, Chain] = {
    "its last operation": Chain(last=F.relu_),
    "its first, on a copy": Chain(first=lambda x: F.relu_(x.clone())),
    "its first, on the output of another": Chain(
        last=lambda y: y, first=lambda x: F.relu_(x) if x.requires_grad else x
    ),
    "the caller": Chain(last=lambda y: y, between=lambda x: x.relu_()),
    "the caller, in part": Chain(last=lambda y: y, between=halved),
    "the caller, through a view": Chain(last=lambda y: y.view(-1).view(-1, 6), between=halved),
    "the caller, and the next": Chain(
        last=lambda y: y * 1.0, between=lambda x: x.mul_(2), first=lambda x: x.add(1).relu_()
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by", CHANGED)
def test_an_output_may_be_changed_in_place_by(by: str, strategy: str) -> None:
    taken = play(CHANGED[by], [train] * 2, BATCHES, strategy=strategy)
    assert all(step.follows for step in taken)


def test_a_detached_output_ends_the_backward_pass_there() -> None:
    model = Chain(between=lambda x: x.detach())
    taken = play(model, [train] * 3, BATCHES)
    assert taken[2].follows
    assert units_of(backward(taken[2]), Op.ENTER) == ["head"]
    assert units_of(backward(taken[2]), Op.REDUCE) == ["head"]


def backward(taken: Taken) -> list[Any]:
    return [event for event in taken.done if event.phase is Phase.BACKWARD]


def test_autocast_works_inside_and_around_the_model() -> None:
    def step(model: nn.Module, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch)
        value.backward()

    assert all(taken.follows for taken in play(Chain(), [step] * 3, BATCHES))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_works_around_a_pass_for_its_values_and_one_for_its_gradients(
    strategy: str, gradients: bool
) -> None:
    """Self-conditioning: what the first pass has cast is not what the second one computes with."""

    def step(model: nn.Module, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(gradients):
                model(batch[0])
            value = loss(model, batch)
        value.backward()

    play(Chain(), [step] * 3, BATCHES, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_that_an_earlier_call_has_computed_has_its_gradient(strategy: str) -> None:
    """Also where nothing else of that call is in the loss."""
    plain, *models = [seeded(normed) for _ in range(3)]  # torch keeps one weight for all copies
    with nn.utils.parametrize.cached():
        plain(BATCHES[0][0])
        loss(plain, BATCHES[0]).backward()
    truth = {name: param.grad for name, param in plain.named_parameters()}

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, comm=comm)
        with nn.utils.parametrize.cached():
            model(BATCHES[0][0])
            loss(model, BATCHES[0]).backward()
        assert_gradients(model, truth)
        assert_at_rest(sharded)

    run_threads(2, rank)


def normed() -> nn.Module:
    model = Chain()
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.get_submodule("fc"))
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_graph_may_go_through_two_sharded_models(strategy: str) -> None:
    """A generator and its critic, each sharded by itself."""
    pairs = [generator_and_critic(), generator_and_critic()]
    plain = nn.ModuleList(deepcopy(pairs[0]))
    truth = averaged(plain, critical_step, BATCHES)
    pairs[1][0].load_state_dict(pairs[0][0].state_dict())
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())

    def rank(comm: Comm) -> None:
        both = nn.ModuleList(pairs[comm.rank])
        sharded = [sw.shard(model, strategy, comm=comm) for model in pairs[comm.rank]]
        for _ in range(3):
            critical_step(both, BATCHES[comm.rank])
            assert_gradients(both, truth)
            for each in sharded:
                assert_at_rest(each)
            both.zero_grad()

    run_threads(2, rank)


def generator_and_critic() -> tuple[Chain, Chain]:
    generator, critic = Chain(), Chain()
    generator.head = nn.Linear(6, 6)
    return generator, critic


def critical_step(both: nn.Module, batch: Batch) -> None:
    critic, generated = both.get_submodule("1"), both.get_submodule("0")(batch[0])
    (critic(generated).sum() - critic(batch[0]).square().sum()).backward()


class Tree(nn.Module):
    """Calls itself on both halves of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(1, 4), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            out: Tensor = self.leaf(x)
            return out
        half = x.shape[1] // 2
        out = torch.tanh(self.join(torch.cat([self(x[:, :half]), self(x[:, half:])], 1)))
        for block in self.blocks:
            out = block(out)
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_may_call_itself(inside: bool, strategy: str) -> None:
    def step(model: nn.Module, batch: Batch) -> None:
        model(batch[0][:, :3]).square().sum().backward()

    model = nn.Sequential(Tree(), nn.Linear(4, 2)) if inside else Tree()
    play(model, [step] * 2, BATCHES, strategy=strategy)


# ---- transforms and forward derivatives ----------------------------------------------------------


class Transforming(Chain):
    """Takes derivatives of its own layers, and reads one's weight in a transform."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        x = torch.func.vmap(lambda row: first(row) + row @ third.fc.weight.t())(x)  # type: ignore[operator,union-attr]
        slope = torch.func.grad(lambda rows: second(rows).square().sum())(x)
        pull = torch.func.vjp(third, slope)[1]
        return super().forward(pull(slope)[0])


def of_the_model(model: nn.Module, batch: Batch) -> None:
    slopes = torch.func.vmap(torch.func.jacrev(model))(batch[0])
    with torch.no_grad():
        target = torch.func.vmap(model)(batch[0] * 0.5)
    (F.mse_loss(torch.func.vmap(model)(batch[0]), target) + slopes.square().mean()).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("model", "step"), [(Chain, of_the_model), (Transforming, train)], ids=["around", "inside"]
)
def test_a_transform_of_torch_func_may_be(
    model: Callable[[], nn.Module], step: Step, strategy: str
) -> None:
    play(model(), [step, train, step], BATCHES, strategy=strategy)


def of_a_tangent(model: nn.Module, batch: Batch) -> None:
    """A loss of the derivative in one direction alone."""
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(batch[0], batch[0].cos()))
        value = forward_ad.unpack_dual(out).tangent.square().mean()
    value.backward()


def of_jvp(model: nn.Module, batch: Batch) -> None:
    """Mean flows train so."""
    out: Any = torch.func.jvp(model, (batch[0],), (batch[0].cos(),))
    F.mse_loss(out[0] + out[1], batch[1]).backward()


def test_forward_derivatives_may_be_in_the_loss() -> None:
    run_processes(2, _forward_derivatives)  # of which threads of one process have one level


def _forward_derivatives(comm: Comm) -> None:
    for strategy, step in product(STRATEGIES, (of_a_tangent, of_jvp)):
        model = seeded(Chain)
        truth = averaged(model, step, BATCHES)
        sharded = sw.shard(model, strategy, comm=comm)
        for _ in range(2):
            model.zero_grad()
            step(model, BATCHES[comm.rank])
            assert_gradients(model, truth)
            assert_at_rest(sharded)


# ---- what cannot work, and says so ---------------------------------------------------------------


class Hoarder(nn.Module):
    """Keeps a tensor for the loss instead of returning it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.ones(6))
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.kept = (y * self.gain).sum()
        return y.detach()


def test_a_loss_of_what_a_unit_kept_to_itself_is_never_silently_wrong() -> None:
    models = [nn.Sequential(Hoarder(), Hoarder(), nn.Linear(6, 2)) for _ in range(2)]
    errors: list[str] = []

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, wrap=sw.wrap.by_class(Hoarder, nn.Linear), comm=comm)
        model(BATCHES[comm.rank][0])
        with pytest.raises(RuntimeError) as error:  # or autograd's own, of a shape that is wrong
            model.get_submodule("0").kept.backward()  # type: ignore[operator]
        errors.append(str(error.value))

    run_threads(2, rank)
    assert len(errors) == 2
    message = "the gradient of '0.gain' was computed while unit '0' was not gathered"
    assert any(error.startswith(message) for error in errors)


class Aside(nn.Module):
    """Makes something for the loss after what it returns, and returns only that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.kept = self.gate(y).sum()
        return y


def test_a_gradient_that_comes_while_its_units_gather_is_in_flight_is_refused_on_every_rank() -> (
    None
):
    """However early the gather may have arrived: nobody has waited for it."""
    models = [nn.Sequential(Aside(), Aside(), nn.Linear(6, 2)) for _ in range(2)]

    def rank(comm: Comm) -> str:
        model = models[comm.rank]
        sw.shard(model, wrap=sw.wrap.by_class(Aside), comm=comm)
        out = model(BATCHES[comm.rank][0])
        kept = model.get_submodule("0").kept
        with pytest.raises(sw.ScheduleError) as error:
            (out.sum() + kept).backward()
        return str(error.value)

    first, second = run_threads(2, rank)
    assert first == second
    assert "the gradient of '0.gate.bias' was computed while unit '0' was not gathered" in first


def test_backward_inside_full_params_is_refused() -> None:
    model = Chain()
    sharded = sw.shard(model, comm=LocalComm())
    with (
        sharded.full_params(),
        pytest.raises(sw.ShardwiseError, match=r"backward\(\) inside full_params"),
    ):
        train(model, BATCHES[0])
    train(model, BATCHES[0])
    assert_at_rest(sharded)


# ---- what is left behind -------------------------------------------------------------------------


def test_hooks_of_the_user_see_whole_parameters_before_and_after_a_unit_computes() -> None:
    models = [Chain(), Chain()]
    shapes: list[torch.Size] = []
    for model in models:
        layer = model.layers[1]

        def look(module: nn.Module, *_: object) -> None:
            shapes.append(module.get_parameter("fc.weight").shape)

        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)

    def rank(comm: Comm) -> None:
        sw.shard(models[comm.rank], comm=comm)
        train(models[comm.rank], BATCHES[comm.rank])

    run_threads(2, rank)
    assert shapes == [torch.Size([6, 6])] * 4


# ---- a model without a forward -----------------------------------------------------------------


def generator_step(model: nn.Module, batch: Batch) -> None:
    generator, judge = model.get_submodule("made"), model.get_submodule("judge")
    judge(generator(batch[0])).square().mean().backward()


def discriminator_step(model: nn.Module, batch: Batch) -> None:
    generator, judge = model.get_submodule("made"), model.get_submodule("judge")
    (judge(batch[0]).mean() - judge(generator(batch[0]).detach()).mean()).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parts_of_a_container_are_called_one_by_one(strategy: str) -> None:
    """Two nets that one module only holds, as in many a GAN."""
    model = nn.ModuleDict(
        {
            "made": nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
            "judge": nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)),
        }
    )
    play(model, [discriminator_step, generator_step] * 2, BATCHES, strategy=strategy)


# ---- what a model may do as it computes ----------------------------------------------------------


class Tied(nn.Module):
    """Reads its embedding's weight outside of that unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.mix(self.embed(ids))
        return hidden @ self.embed.weight.T


BY_LAYER = sw.wrap.by_class(nn.Embedding, nn.Linear)
IDS = torch.tensor([[1, 2, 6]])


def test_a_unit_that_was_read_from_outside_is_gathered_anew_after_a_pass_without_an_end() -> None:
    model = Tied()
    sharded = sw.shard(model, wrap=BY_LAYER, comm=FakeComm(0, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS)
    assert "embed" in sharded.runtime.facts.gathered
    optimizer.step()
    assert sharded.runtime.facts.gathered == set()
    nbytes = {bucket.unit: bucket.full.untyped_storage().nbytes() for bucket in sharded.buckets}
    assert nbytes["mix"] == 0
    assert nbytes["embed"] > 0  # which the graph still reads
    assert not any(bucket.gathered for bucket in sharded.buckets)
    recorder = Recorder(sharded)
    model(IDS).sum().backward()
    assert [e.unit for e in recorder.events if e.op is Op.GATHER][:2] == ["embed", "mix"]
    assert_at_rest(sharded)


def test_between_steps_is_not_in_the_middle_of_one() -> None:
    model = Tied()
    sharded = sw.shard(model, comm=FakeComm(0, 2))
    model.mix.register_forward_hook(lambda *_: sharded.relayout())
    assert "in the middle of a step" in error_text(sw.ScheduleError, lambda: model(IDS))


@pytest.mark.parametrize("copied", [pickle.dumps, deepcopy])
@pytest.mark.parametrize("part", ["0", "0.0"])
def test_a_container_of_sharded_parts_is_not_copied(
    part: str, copied: Callable[[nn.Module], Any]
) -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))
    sw.shard(model, wrap=sw.wrap.whole(), comm=FakeComm(0, 2))
    text = error_text(sw.ShardUseError, lambda: copied(model.get_submodule(part)))
    assert "a module of the sharded Sequential cannot be pickled, or copied without" in text
    assert "cannot be pickled" in error_text(sw.ShardUseError, lambda: pickle.dumps(model))
