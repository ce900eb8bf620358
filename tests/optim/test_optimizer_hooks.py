"""Elementwise optimizers step on shards as on whole parameters; all others are told why not."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.sharding import sharding_of
from shardwise.optim.optimizer_hooks import OptimizerHooks
from tests import nets
from tests.copies import assert_near, clones, equal, error_text, on_ranks, seeded
from tests.fake import FakeComm
from tests.nets import Net
from tests.parity.plain import Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.steps import STRATEGIES, averaged, train

ODD = Net(nets.scalar_and_13_rows, nets.scalar_and_13_rows_batch)  # scalars, too
Groups = Iterable[nn.Parameter]

ELEMENTWISE: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.01},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"weight_decay": 0.1},
    torch.optim.NAdam: {"weight_decay": 0.01},
    torch.optim.RAdam: {"weight_decay": 0.01},
    torch.optim.Adamax: {"weight_decay": 0.01},
    torch.optim.Adagrad: {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    torch.optim.Adadelta: {"weight_decay": 0.01},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.Rprop: {},
    torch.optim.ASGD: {"t0": 1.0, "lambd": 0.01},
}


def in_groups(kind: type[Optimizer], params: Iterable[nn.Parameter]) -> Optimizer:
    """Matrices at one rate, the rest at another: by ``ndim``, as everybody writes it.

    It makes no difference whether the parameters are whole or shards by now.
    """
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "lr": 0.05},
        {"params": [p for p in params if p.ndim < 2], "lr": 0.01},
    ]
    return kind(groups, **ELEMENTWISE[kind])


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_an_elementwise_optimizer_steps_on_shards_as_on_whole_parameters(
    kind: type[Optimizer],
) -> None:
    """Made before ``shard()`` or after it, with groups: bit-equal, scalars included."""
    recipe = Recipe.of(ODD, lambda params: in_groups(kind, params))
    plain = one_by_one(recipe, 3)
    assert_equal(on_threads(3, recipe, How()), plain, "full_shard")

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        optimizer = in_groups(kind, model.parameters())
        sw.shard(model, comm=comm)
        for step in range(recipe.steps):
            for batch in recipe.batches(step, comm.rank):
                train(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    assert all(equal(state, plain.states[0]) for state in on_ranks(3, ODD.build, rank))


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_state_from_before_shard_is_cut_with_the_parameters(kind: type[Optimizer]) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            train(model, ODD.batch(number, 2))  # the same on every rank: its mean is exact
            optimizer.step()
            optimizer.zero_grad()

    plain = seeded(ODD.build)
    steps(plain, in_groups(kind, plain.parameters()), range(4))
    expected = clones(plain.state_dict())

    def rank(comm: Comm, model: nn.Module) -> None:
        optimizer = in_groups(kind, model.parameters())
        steps(model, optimizer, range(2))
        sharded = sw.shard(model, comm=comm)
        steps(model, optimizer, range(2, 4))
        assert equal(model.state_dict(), expected)
        for param in model.parameters():
            shapes = {value.shape for value in optimizer.state[param].values() if value is not None}
            assert shapes <= {param.shape, torch.Size(())}
        # And back: the plain model goes on with whole state.
        sharded.unshard()
        comm.agree({})  # ranks that are threads share torch's list of hooks
        steps(model, optimizer, range(4, 6))
        assert not equal(model.state_dict(), expected)

    on_ranks(4, ODD.build, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_from_before_shard_lies_in_memory_as_its_shard_does(strategy: str) -> None:
    """A fused kernel goes through both side by side: a channels_last image has another order.

    A parameter that one rank holds whole is not cut, and so is not copied otherwise.
    """

    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 3))
        return nn.Module.to(model, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def steps(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for seed in range(2):
            image = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(seed))
            model(image).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        return clones(model.state_dict())

    plain = seeded(build)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4, fused=True)
    steps(plain, optimizer)
    expected = steps(plain, optimizer)

    def rank(comm: Comm, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)
        steps(model, optimizer)
        sw.shard(model, strategy, comm=comm)
        assert_near(steps(model, optimizer), expected, 2e-5)
        for param in model.parameters():
            assert optimizer.state[param]["exp_avg"].stride() == param.stride()

    on_ranks(2, build, rank)


class Signed(Optimizer):
    """Somebody's own."""

    def __init__(self, params: Groups, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    param.sub_(param.grad.sign(), alpha=group["lr"])


class SignedElementwise(Signed):
    elementwise = True


REFUSED: dict[str, tuple[Callable[[Groups], Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "its line search needs inner products over whole parameters"),
    "Adafactor": (torch.optim.Adafactor, "averages over whole rows and columns"),
    "Muon": (
        lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
        "it orthogonalises whole matrices",
    ),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_looks_across_elements_is_refused_with_the_reason(
    name: str, world: int
) -> None:
    """On one rank, too, so that nobody meets the rule for the first time at scale."""
    make, reason = REFUSED[name]

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model.parameters())
        train(model, nets.decoder_batch(comm.rank, 2))
        before = clones(sharded.local_state_dict())
        text = error_text(sw.OptimizerError, lambda: optimizer.step(lambda: 0.0))
        assert equal(sharded.local_state_dict(), before)
        return text

    for text in on_ranks(world, nets.decoder, rank):
        assert text.startswith(f"{name} cannot step on shards (")
        assert f"{reason}" in text
        assert "so on shards it would be silently wrong" in text
        instead = "an elementwise optimizer such as torch.optim.AdamW"
        if name == "Muon":
            instead = "sw.optim.Muon(sharded), which is exact on shards"
        assert text.endswith(f'Use {instead}, or strategy="no_shard".')


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_sparse_adam_is_refused_since_averages_are_dense(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        optimizer = torch.optim.SparseAdam(list(model.parameters()))
        train(model, nets.decoder_batch(comm.rank, 2))
        return error_text(sw.OptimizerError, optimizer.step)

    for text in on_ranks(2, nets.decoder, rank):
        assert text.startswith("SparseAdam cannot step on a sharded model: it needs sparse")


def test_where_every_rank_has_all_any_optimizer_steps() -> None:
    """LBFGS apart, which steps by its own line search: its ranks see their own losses."""
    world, batches = 2, [nets.decoder_batch(rank, 2) for rank in range(2)]
    for name in ("Adafactor", "Muon"):
        make = REFUSED[name][0]
        plain = seeded(nets.decoder)
        for param, grad in zip(
            plain.parameters(), averaged(plain, train, batches).values(), strict=True
        ):
            param.grad = grad
        make(plain.parameters()).step()

        def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
            sw.shard(model, "no_shard", comm=comm)
            train(model, batches[comm.rank])
            make(model.parameters()).step()  # noqa: B023 - called at once
            return model.state_dict()

        for state in on_ranks(world, nets.decoder, rank):
            assert equal(state, clones(plain.state_dict()))


def test_the_refusal_is_the_same_on_a_rank_that_holds_all_of_what_is_optimized() -> None:
    def rank(comm: Comm, model: nn.Module) -> bool:
        sw.shard(model, comm=comm)
        bias = model.get_parameter("blocks.0.offset")
        optimizer = torch.optim.LBFGS([bias])
        train(model, ODD.batch(comm.rank, 2))
        error_text(sw.OptimizerError, lambda: optimizer.step(lambda: 0.0))
        return bias.shape.numel() == 1

    assert sorted(on_ranks(3, ODD.build, rank)) == [False, False, True]


class SignedByNorm(SignedElementwise):
    """What its base says of itself does not hold for a step of its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


class DecayedAdamW(torch.optim.AdamW):
    """A subclass of one that is known, with its step."""


class ClippedAdamW(torch.optim.AdamW):
    """One with a step of its own, which looks across each parameter."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.grad.div_(param.grad.norm())
        super().step()


class NormalisedAdamW(torch.optim.AdamW):
    """One with torch's step, and a helper of its own, which looks across each parameter."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for param in group["params"]:
            param.grad.div_(param.grad.norm())
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]


class ValueClippedAdamW(ClippedAdamW):
    elementwise = True


@pytest.mark.parametrize("world", [1, 2])
def test_an_unknown_optimizer_is_refused_until_it_says_that_it_is_elementwise(world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sw.shard(model, comm=comm)
        train(model, nets.decoder_batch(comm.rank, 2))
        for kind in (SignedElementwise, DecayedAdamW, ValueClippedAdamW):
            kind(model.parameters()).step()
        refused: list[type[Optimizer]] = [Signed, SignedByNorm, ClippedAdamW, NormalisedAdamW]
        return [error_text(sw.OptimizerError, kind(model.parameters()).step) for kind in refused]  # type: ignore[call-arg]

    for texts in on_ranks(world, nets.decoder, rank):
        names = ("Signed", "SignedByNorm", "ClippedAdamW", "NormalisedAdamW")
        for text, name in zip(texts, names, strict=True):
            assert "it is not known to update each element by itself" in text
            assert f"takes no norm or sum of a parameter: `{name}.elem" in text
        assert "since it has a step() of its own and not that of AdamW" in texts[2]
        assert "since it has a _init_group() of its own and not that of AdamW" in texts[3]


class ByKernel(SignedElementwise):
    """Updates by a kernel that takes memory and its length, as 8-bit optimizers do."""

    elementwise = True

    def __init__(self, params: Groups, before: Callable[[], object]) -> None:
        super().__init__(params)
        self.before = before

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.before()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.view(-1).sub_(param.grad.view(-1), alpha=0.1)


def test_a_step_inside_another_optimizers_step_leaves_that_its_plain_tensors() -> None:
    """Ranks that are threads end their steps in the middle of each other's."""

    def rank(comm: Comm, model: nn.Module) -> None:
        other = copy.deepcopy(model)
        for one in (model, other):
            sw.shard(one, comm=comm)
            train(one, nets.decoder_batch(comm.rank, 2))
        assert all(param.grad is not None for param in model.parameters())  # and so they are marked
        inner = torch.optim.SGD(other.parameters(), lr=0.1)
        ByKernel(model.parameters(), inner.step).step()
        for one in (model, other):
            assert {type(param) for param in one.parameters()} == {ShardedParameter}
            assert {type(param.grad) for param in one.parameters()} == {ShardTensor}

    on_ranks(2, nets.decoder, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_would_miss_accumulated_gradients_is_an_error(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sharded.no_sync():
            train(model, nets.decoder_batch(comm.rank, 2))
        before = clones(sharded.local_state_dict())
        text = error_text(sw.ScheduleError, optimizer.step)
        assert equal(sharded.local_state_dict(), before)
        sharded.drop_gradients()
        optimizer.step()
        assert equal(sharded.local_state_dict(), before)
        return text

    for text in on_ranks(2, nets.decoder, rank):
        assert text == (
            "unit 'embed' holds gradients that were accumulated and never reduced, so this update "
            "would miss them. Run the last micro-batch under sharded.accumulate(last=True), or "
            "call sharded.drop_gradients()."
        )


def test_a_step_inside_the_backward_pass_is_an_error() -> None:
    """One in a hook after a gradient is not: it is called when all have been averaged."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.get_parameter("blocks.1.norm1.weight")
        handle = weight.register_hook(lambda _: optimizer.step())
        text = error_text(sw.ScheduleError, lambda: train(model, nets.decoder_batch(comm.rank, 2)))
        handle.remove()
        return text

    for text in on_ranks(2, nets.decoder, rank):
        assert text.startswith("an optimizer stepped in the middle of a step")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_pass_without_a_backward_one_is_not_in_the_way_of_a_step(strategy: str) -> None:
    """Somebody logs a loss and forgets ``no_grad``: units are left gathered.

    Nor of the optimizer's state, when that is asked for.
    """
    shapes = [param.shape for param in nets.decoder().parameters()]

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, strategy, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, nets.decoder_batch(comm.rank, 2))
        logged = nets.loss(model, nets.decoder_batch(comm.rank, 2))
        optimizer.step()
        after = nets.loss(model, nets.decoder_batch(comm.rank, 2))
        assert after < logged
        state = optimizer.state_dict()["state"]
        assert [value["momentum_buffer"].shape for value in state.values()] == shapes
        return clones(model.state_dict())

    plain = one_by_one(
        Recipe(
            nets.decoder,
            lambda seed, rows: nets.decoder_batch(seed // 100 % 100, rows),
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            steps=1,
        ),
        2,
    )
    for state in on_ranks(2, nets.decoder, rank):
        assert equal(state, plain.states[0])


def test_one_optimizer_steps_on_a_sharded_and_a_plain_model() -> None:
    plain, head = seeded(nets.decoder), nn.Linear(37, 1)
    batch = nets.decoder_batch(0, 2)

    def step(model: nn.Module, head: nn.Module, optimizer: Optimizer) -> None:
        head(model(batch[0])).square().mean().backward()
        optimizer.step()

    def rank(comm: Comm, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sw.shard(model, comm=comm)
        mine = nn.Linear(37, 1)
        mine.load_state_dict(start)
        optimizer = torch.optim.AdamW([*model.parameters(), *mine.parameters()])
        for _ in range(2):
            step(model, mine, optimizer)
            optimizer.zero_grad()
        return model.state_dict(), mine.state_dict()

    start = clones(head.state_dict())
    optimizer = torch.optim.AdamW([*plain.parameters(), *head.parameters()])
    for _ in range(2):
        step(plain, head, optimizer)
        optimizer.zero_grad()
    for state, other in on_ranks(2, nets.decoder, rank):
        assert equal(state, clones(plain.state_dict()))
        assert equal(other, clones(head.state_dict()))


@pytest.mark.parametrize("make", [torch.optim.AdamW, "sw.optim.AdamW"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizers_own_state_dict_is_whole_on_every_rank(strategy: str, make: Any) -> None:
    """So rank 0 saves it as a plain script does, and every rank loads it, before or after shard().

    Another number of ranks does, too.
    """
    flat, adamw = make == "sw.optim.AdamW", partial(sw.optim.AdamW, eps=1e-4)

    def optimizer_of(model: nn.Module, handle: sw.Sharded) -> Optimizer:
        return adamw(handle) if flat else torch.optim.AdamW(model.parameters(), eps=1e-4)

    def steps(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for number in range(2):
            train(model, ODD.batch(number, 2))  # the same on every rank: its mean is exact
            optimizer.step(), optimizer.zero_grad()
        return clones(model.state_dict())

    def first(comm: Comm, model: nn.Module) -> tuple[Any, ...]:
        optimizer = optimizer_of(model, sw.shard(model, strategy, comm=comm))
        before = steps(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        shapes = [saved["state"][k]["exp_avg"].shape for k in range(len(saved["state"]))]
        return saved, before, shapes, steps(model, optimizer)

    results = on_ranks(4, ODD.build, first)
    saved, before, shapes, after = results[0]
    assert shapes == [param.shape for param in ODD.build().parameters()]
    for other in results[1:]:
        assert equal(flattened(other[0]), flattened(saved))

    def resumed(early: bool, comm: Comm, model: nn.Module) -> None:
        model.load_state_dict(before)
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
        if early:
            optimizer.load_state_dict(copy.deepcopy(saved))
        handle = sw.shard(model, strategy, comm=comm)
        if not early:
            optimizer = optimizer_of(model, handle)
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert equal(flattened(optimizer.state_dict()), flattened(saved))  # before a step
        assert_near(steps(model, optimizer), after, 2e-5)

    for early in (False, True):
        on_ranks(2, ODD.build, partial(resumed, early))


def flattened(states: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{n} {key}": value for n, s in states["state"].items() for key, value in s.items()}


def test_parameters_that_an_optimizer_gets_later_are_seen() -> None:
    """Inside the step they show the plain class, which torch's fused kernels want."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        first, second, third, *_ = model.parameters()
        inside = list[list[type]]()

        class Looking(SignedElementwise):
            elementwise = True

            def step(self, closure: object = None) -> None:  # type: ignore[override]
                inside.append([type(p) for p in (first, second, third)])

        optimizer = Looking([first])
        train(model, nets.decoder_batch(comm.rank, 2))
        optimizer.step()
        optimizer.add_param_group({"params": [second]})
        optimizer.step()
        optimizer.param_groups[0]["params"].append(third)
        optimizer.step()
        plain, guarded = nn.Parameter, ShardedParameter
        assert inside == [[plain, guarded, guarded], [plain, plain, guarded], [plain] * 3]
        assert [type(p) for p in (first, second, third)] == [guarded] * 3

    on_ranks(2, nets.decoder, rank)


def test_code_of_users_around_a_step_sees_shards() -> None:
    """Hooks of the optimizer, whenever they were added, and the closure: a norm is the whole's."""

    def rank(comm: Comm, model: nn.Module) -> list[float]:
        sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight, norms = model.get_parameter("lm_head.weight"), list[float]()
        model.requires_grad_(False)

        def look(*_: object) -> None:
            norms.append(weight.detach().norm().item())

        def stop(*_: object) -> None:
            look()
            raise Stop

        for _ in range(2):
            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)
            optimizer.step(look)
        optimizer.register_step_pre_hook(stop)
        with pytest.raises(Stop):
            optimizer.step()
        look()
        return norms

    whole = seeded(nets.decoder).get_parameter("lm_head.weight").norm().item()
    for norms in on_ranks(2, nets.decoder, rank):
        assert norms == pytest.approx([whole] * 12, rel=1e-6)


def step_hooks() -> int:
    return len(OptimizerHooks._of_models)


def test_the_hooks_of_models_that_are_gone_go_with_the_next_model() -> None:
    def shard_and_step() -> weakref.ref[nn.Module]:
        model = nets.decoder()
        sw.shard(model)
        train(model, nets.decoder_batch(0, 2))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return weakref.ref(model)

    gc.collect()
    kept = nets.decoder()
    sharded = sw.shard(kept)
    before = step_hooks()
    for _ in range(3):
        ref = shard_and_step()
        gc.collect()
        assert ref() is None
    after = step_hooks()
    assert after <= before + 1
    sharded.unshard()
    assert step_hooks() < after


def test_a_model_may_be_sharded_while_the_optimizer_of_another_steps() -> None:
    """Ranks that are threads do, and torch iterates over its hooks meanwhile."""
    first, second = nets.decoder(), nets.decoder()
    sharded = sw.shard(first)
    train(first, nets.decoder_batch(0, 2))
    sharded.runtime.before_update.append(lambda: sw.shard(second))
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    assert sharding_of(second.get_parameter("lm_head.weight"))


# --- state that is loaded -----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_state_is_loaded_before_the_first_step_and_after_it(
    strategy: str, steps: int
) -> None:
    """A run that began unsharded goes on: ``optimizer.load_state_dict(torch.load(...))``."""

    def run(model: nn.Module, shard: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        def train_on(optimizer: Optimizer, steps: int) -> None:
            for _ in range(steps):
                train(model, ODD.batch(0, 2))
                optimizer.step(), optimizer.zero_grad()

        first = torch.optim.AdamW(model.parameters(), lr=0.1)
        train_on(first, 2)
        saved = copy.deepcopy(first.state_dict())
        shard(model)
        second = torch.optim.AdamW(model.parameters(), lr=0.1)
        train_on(second, steps)
        for _ in range(2):  # the second time it is known already
            second.load_state_dict(copy.deepcopy(saved))
            train_on(second, 1)
        return clones(model.state_dict())

    plain = run(seeded(ODD.build), lambda model: None)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        return run(model, lambda model: sw.shard(model, strategy, comm=comm))

    for state in on_ranks(4, ODD.build, rank):
        assert equal(state, plain)


def test_state_of_another_number_of_ranks_is_refused() -> None:
    model = nn.Linear(6, 6)
    sw.shard(model, comm=FakeComm(0, 3))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(
        {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 6)}},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
    assert error_text(sw.ShardwiseError, optimizer.step) == (
        "state 'exp_avg' of parameter 'weight' is of other ranks, or has no value for each "
        "element and cannot be cut. Load full state, as optimizer.state_dict() gives it, or use "
        "sharded.load(). Its shape is (4, 6); the shard here is (32, 1) of (6, 6)."
    )


def test_state_that_fits_on_one_rank_alone_is_refused_on_every_rank() -> None:
    """What rank 0 has of its shard, saved by other means and loaded by all."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        optimizer = torch.optim.Adam(model.parameters())
        first = {"step": torch.tensor(1.0), "exp_avg": torch.ones(8, 4)}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: first}, "param_groups": groups})
        return error_text(sw.RanksDisagree, optimizer.step)

    for text in on_ranks(2, lambda: nn.Linear(4, 12, bias=False), rank):
        assert "state 'exp_avg' of parameter 'weight' is of other ranks, or has" in text


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_groups_that_differ_by_rank_are_refused(strategy: str) -> None:
    """``p.shape`` is this rank's, so a group that is chosen by it is this rank's, too."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        own = [param for param in model.parameters() if param.shape.numel()]
        empty = [param for param in model.parameters() if not param.shape.numel()]
        groups: list[dict[str, Any]] = [{"params": own}, {"params": empty, "lr": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        train(model, ODD.batch(0, 2))
        return error_text(sw.RanksDisagree, optimizer.step)

    for text in on_ranks(2, ODD.build, rank):
        assert "SGD group of blocks.0.back.bias: rank 0: 1; rank 1: 0" in text


def test_so_is_a_group_that_one_rank_adds_later() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD(rest, lr=0.1)
        train(model, ODD.batch(0, 2))
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0:
            optimizer.add_param_group({"params": [first]})
        else:
            optimizer.param_groups[0]["params"].append(first)
        train(model, ODD.batch(1, 2))
        return error_text(sw.RanksDisagree, optimizer.step)

    for text in on_ranks(2, ODD.build, rank):
        assert "SGD group of temperature: rank 0: 1; rank 1: 0" in text


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_so_are_settings_of_a_group_that_differ(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1 * comm.rank)
        train(model, ODD.batch(0, 2))
        return error_text(sw.RanksDisagree, optimizer.step)

    for text in on_ranks(2, ODD.build, rank):
        assert "AdamW weight_decay of group 0: rank 0: 0.0; rank 1: 0.1" in text
        assert "betas" not in text


class TwoMomentums(Signed):
    """State of an elementwise optimizer that is one tensor for both, as AdEMAMix's may be."""

    elementwise = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("both", torch.zeros(2, *param.shape)).add_(param.grad)


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_state_that_cannot_be_cut_is_neither_given_out_nor_taken(strategy: str) -> None:
    """Rank 0's part would be saved as if it were all, and on shards of one row it broadcasts."""

    def rank(comm: Comm, model: nn.Module) -> list[str]:
        before = TwoMomentums(model.parameters())
        train(model, ODD.batch(0, 2))
        before.step()
        sw.shard(model, strategy, comm=comm)
        after = TwoMomentums(model.parameters())
        train(model, ODD.batch(0, 2))
        after.step()
        return [error_text(sw.OptimizerError, do) for do in (before.step, after.state_dict)]

    for text in [text for texts in on_ranks(2, ODD.build, rank) for text in texts]:
        assert "has no value for each element and cannot be cut" in text


class Rows(Signed):
    """One value for each row: of a shard of one row it could be one number for a parameter."""

    elementwise = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["row"] = torch.zeros(len(param))


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_state_that_cannot_be_cut_on_one_rank_is_refused_on_every_rank(strategy: str) -> None:
    """The other rank waited for it."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        optimizer = Rows(model.parameters())
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        return error_text(sw.RanksDisagree, optimizer.state_dict)

    for text in on_ranks(2, lambda: nn.Linear(16, 3, bias=False), rank):
        assert "state 'row' of parameter 'weight'" in text


class Wrapper(Optimizer):
    """Like pytorch_optimizer's Lookahead: without torch's ``__init__``, and with torch's hooks."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_a_wrapper_without_torchs_hooks_steps_where_every_rank_has_all() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, "no_shard", comm=comm)
        train(model, nets.decoder_batch(0, 2))
        Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)).step()
        return clones(model.state_dict())

    plain = seeded(nets.decoder)
    train(plain, nets.decoder_batch(0, 2))
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(equal(state, plain.state_dict()) for state in on_ranks(2, nets.decoder, rank))


class Lookahead(Wrapper):
    """A wrapper with slow weights, which it stores by itself."""

    elementwise = True

    def state_dict(self) -> dict[str, Any]:
        return {"slow": dict(self.state), "base": self.inner.state_dict()}


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_a_wrapper_that_stores_its_own_state_is_refused_on_shards(strategy: str) -> None:
    """It stored one rank's part as the whole."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        train(model, nets.decoder_batch(0, 2))
        return error_text(
            sw.OptimizerError, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)).step
        )

    for text in on_ranks(2, nets.decoder, rank):
        assert "Lookahead cannot step on shards" in text
        assert "its state_dict() calls no torch's, and would give one rank's part" in text


# --- parameters beside those of the model -----------------------------------------------------


@pytest.fixture
def no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other tests that are still there look at every optimizer, too."""
    monkeypatch.setattr(OptimizerHooks, "_of_models", [])


@pytest.mark.usefixtures("no_other_models")
def test_parameters_of_no_sharded_model_are_counted_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of another sharded model are averaged; those that get no gradient do not move."""

    def rank(comm: Comm, model: nn.Module) -> None:
        other = seeded(ODD.build)
        sw.shard(model, comm=comm), sw.shard(other, comm=comm)
        plain = nn.ParameterDict({str(n): nn.Parameter(torch.ones(n)) for n in range(1, 6)})
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        optimizer.add_param_group({"params": list(plain.values())})
        for step in range(3):
            train(model, ODD.batch(0, 2))
            for param in plain.values() if step else ():
                param.grad = torch.ones_like(param)
            optimizer.step()
            assert bool(caplog.messages) <= bool(step)

    with caplog.at_level(logging.WARNING, "shardwise"):
        on_ranks(2, ODD.build, rank)
    text = of_each_optimizer(caplog.messages)
    assert text == (
        "SGD holds 5 parameters that are in no sharded model (one of shape (1,), one of shape "
        "(2,), one of shape (3,), …), beside one that is trained: each of the 2 ranks updates its "
        "own copy by its own gradients, so the copies will differ. Shard the module that holds "
        "them, too, or average their gradients before each step, as DistributedDataParallel does."
    )


def of_each_optimizer(messages: list[str]) -> str:
    """What was said once of each: rank 0's hooks see the optimizers of all threads there are."""
    assert len(messages) in (1, 2)  # the other thread may have ended before
    [text] = set(messages)
    return text


@pytest.mark.usefixtures("no_other_models")
def test_they_are_told_by_their_names_where_the_optimizer_knows_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, weights = ODD.build(), nn.ParameterDict({"aux": nn.Parameter(torch.ones(3))})
    sw.shard(model, comm=FakeComm(0, 2))
    optimizer = torch.optim.SGD([*model.named_parameters(), *weights.named_parameters()], lr=0.1)
    weights["aux"].grad = torch.ones(3)
    optimizer.step()
    assert "holds 1 parameters that are in no sharded model (aux), beside" in caplog.text


@pytest.mark.usefixtures("no_other_models")
def test_parameters_that_an_optimizer_of_their_own_trains_beside_the_model_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once the sharded model is trained; a teacher that is only called says nothing of them."""

    def rank(comm: Comm, model: nn.Module) -> None:
        head = nn.Linear(2, 2)
        sw.shard(model, comm=comm)
        beside = torch.optim.SGD(head.named_parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step > 1:
                train(model, ODD.batch(0, 2))
                optimizer.step()
            head(torch.ones(2)).sum().backward()
            beside.step()
            assert bool(caplog.messages) <= (step > 1)

    with caplog.at_level(logging.WARNING, "shardwise"):
        on_ranks(2, ODD.build, rank)
    text = of_each_optimizer(caplog.messages)
    assert text == (
        "SGD holds 2 parameters that are in no sharded model (weight, bias), beside one that is "
        "trained: each of the 2 ranks updates its own copy by its own gradients, so the copies "
        "will differ. Shard the module that holds them, too, or average their gradients before "
        "each step, as DistributedDataParallel does."
    )


@pytest.mark.usefixtures("no_other_models")
def test_one_rank_has_nothing_to_differ_from(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = ODD.build(), nn.Parameter(torch.ones(3))
    sw.shard(model, comm=LocalComm())
    optimizer = torch.optim.SGD([*model.parameters(), plain])
    train(model, ODD.batch(0, 2))
    plain.grad = torch.ones(3)
    optimizer.step()
    assert caplog.messages == []


# --- However a step ends, parameters are guarded after it -----


class Stop(RuntimeError):
    """Raised on purpose."""


class Stops(torch.optim.SGD):
    """An optimizer whose own code raises."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        assert {type(param) for param in self.param_groups[0]["params"]} == {nn.Parameter}
        raise Stop


def stop(*_: object) -> None:
    raise Stop


def in_a_hook(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(stop)
    optimizer.step()


def in_a_closure(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step(stop)


def in_the_optimizer(model: nn.Module) -> None:
    Stops(model.parameters(), lr=0.1).step()


def trained() -> sw.Sharded:
    sharded = sw.shard(nets.decoder(), comm=FakeComm(0, 2))
    train(sharded.model, nets.decoder_batch(0, 2))
    assert all(param.grad is not None for param in sharded.model.parameters())  # marked from now on
    return sharded


def kinds(model: nn.Module) -> set[type]:
    return {type(param) for param in model.parameters()}


@pytest.mark.parametrize("stopping", [in_a_hook, in_a_closure, in_the_optimizer])
def test_after_a_step_that_raised_parameters_are_guarded(
    stopping: Callable[[nn.Module], None],
) -> None:
    model = trained().model
    with suppress(Stop):
        stopping(model)
    assert kinds(model) == {ShardedParameter}
    with pytest.raises(sw.ShardUseError):
        next(model.parameters()).cumsum(0)


def test_while_the_exception_is_kept_the_next_forward_pass_guards_them() -> None:
    """A notebook keeps the last one; when it is forgotten is nobody's business."""
    model = trained().model
    with pytest.raises(Stop) as kept:
        in_the_optimizer(model)
    assert kinds(model) == {nn.Parameter}
    train(model, nets.decoder_batch(0, 2))
    del kept
    assert kinds(model) == {ShardedParameter}


def test_state_is_plain_and_a_copy_of_the_shard_makes_its_sums_global() -> None:
    """As docs/optimizers.md says."""

    def rank(comm: Comm, model: nn.Module) -> float:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, ODD.batch(comm.rank, 2))
        optimizer.step()
        whole = sharded.optimizer_state_dict(optimizer)["state"]
        for name, param in model.named_parameters():
            moment = optimizer.state[param]["exp_avg"]
            assert type(moment) is Tensor
            norm = param.detach().clone().copy_(moment).norm()
            assert_near(norm, whole[name]["exp_avg"].norm())
        return float(norm)

    assert len(set(on_ranks(3, ODD.build, rank))) == 1
