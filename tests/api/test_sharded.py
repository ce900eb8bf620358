"""The entry point: what ``shard()`` takes, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import Sharding, sharding_of
from tests import nets
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.nets import NETS, Batch, Block, Net
from tests.parity.plain import Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.ranks import run_processes, run_threads
from tests.steps import STRATEGIES, assert_gradients, averaged, train

DIM = 64


class Digits(nn.Module):
    """The classifier of handwritten digits that every tutorial shards, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.fc1 = nn.Linear(32, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


def digits_batch(seed: int, rows: int) -> Batch:
    return nets.numbers(seed, (rows, 1, 8, 8)), nets.tokens(seed + 1, (rows,), 10)


def toy() -> nn.Module:
    layers = [nn.Linear(DIM, DIM, bias=False), nn.Tanh(), nn.Linear(DIM, DIM, bias=False)]
    return nn.Sequential(*layers)


def shardings(model: nn.Module) -> dict[str, Sharding]:
    by_name = {name: sharding_of(param) for name, param in model.named_parameters()}
    return {name: sharding for name, sharding in by_name.items() if sharding is not None}


# --- what stays ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_names_modules_and_parameter_objects_stay(net: Net, strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        modules, text = dict(model.named_modules()), str(model)
        params = dict(model.named_parameters(remove_duplicate=False))
        sharded = sw.shard(model, strategy, comm=comm)
        assert sharded.model is model
        assert dict(model.named_modules()) == modules
        assert str(model) == text
        after = dict(model.named_parameters(remove_duplicate=False))
        assert list(after) == list(params)
        assert all(after[name] is params[name] for name in params)

    on_ranks(2, net.build, rank)


def test_parameter_groups_have_their_own_rates_and_decay() -> None:
    """By name, by ``ndim``, by ``requires_grad``: as with a plain model, since nothing is flat."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.requires_grad]
        return torch.optim.AdamW(
            [
                {"params": matrices[::2], "lr": 0.1, "weight_decay": 0.5},
                {"params": matrices[1::2], "lr": 0.01, "weight_decay": 0.0},
            ]
        )

    recipe = Recipe(
        nets.mostly_frozen, nets.mostly_frozen_batch, lambda params: optimizer(list(params))
    )
    plain = one_by_one(recipe, 3)
    for strategy in STRATEGIES:
        assert_equal(on_threads(3, recipe, How(strategy)), plain, strategy)


def test_use_orig_params_is_what_there_is() -> None:
    sw.shard(toy(), use_orig_params=True)
    text = error_text(sw.ConfigError, lambda: sw.shard(toy(), use_orig_params=False))  # type: ignore[arg-type]
    assert text == (
        "use_orig_params is False; choose one of True. Parameters keep their names and objects, so "
        "parameter groups and mixed requires_grad work; there is no flat parameter."
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_from_before_shard_are_kept_and_added_to(strategy: str) -> None:
    world, batch = 2, nets.decoder_batch(7, 2)
    plain = seeded(nets.decoder)
    train(plain, batch)
    before = {name: param.grad for name, param in plain.named_parameters()}
    batches = [nets.decoder_batch(rank, 2) for rank in range(world)]
    after = averaged(seeded(nets.decoder), train, batches)
    both = {name: before[name] + after[name] for name in before}  # type: ignore[operator]

    def rank(comm: Comm, model: nn.Module) -> None:
        train(model, batch)
        sw.shard(model, strategy, comm=comm)
        assert_gradients(model, before)
        train(model, batches[comm.rank])
        assert_gradients(model, both)

    on_ranks(world, nets.decoder, rank)


def test_ranks_stop_together() -> None:
    """The loop of docs/step.md: all end it as soon as one has no batch."""

    def rank(comm: Comm, model: nn.Module) -> tuple[list[bool], int]:
        sharded = sw.shard(model, comm=comm)
        votes = [sharded.any(comm.rank == 1), sharded.all(comm.rank == 1)]
        votes += [sharded.any(False), sharded.all(torch.tensor(True))]
        batches, steps = (nets.decoder_batch(n, 2) for n in range(4 - comm.rank)), 0
        while sharded.all((batch := next(batches, ())) != ()):
            train(model, batch)
            steps += 1
        return votes, steps

    assert on_ranks(3, nets.decoder, rank) == [([True, False, False, True], 2)] * 3


# --- where the elements are ------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_without_buckets_each_parameter_is_cut_along_its_first_dimension(world: int) -> None:
    whole = seeded(toy).get_parameter("0.weight")

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm, bucketing="none")
        assert isinstance(model, nn.Sequential)
        assert model[0].weight.shape == (DIM / world, DIM)
        assert torch.equal(model.get_parameter("0.weight").detach(), whole.chunk(world)[comm.rank])
        assert repr(model) == repr(toy())

    on_ranks(world, toy, rank)


def test_what_does_not_divide_is_refused_on_request_with_the_seeds_sentence() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        options = {"comm": comm, "bucketing": "none", "uneven": "error"}
        text = error_text(sw.ConfigError, lambda: sw.shard(model, **options))  # type: ignore[arg-type]
        assert shardings(model) == {}
        sw.shard(model, comm=comm, bucketing="none")
        return text

    for text in on_ranks(2, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7)), rank):
        assert text == (
            "Current sharding requires the first dimension of the parameter '1.weight' (7) to be "
            "divisible by the world size (2)"
        )


def test_what_does_not_divide_is_padded_by_default() -> None:
    recipe = Recipe(
        lambda: nn.Linear(3, 3),
        lambda seed, rows: (nets.numbers(seed, (rows, 3)), nets.numbers(seed + 1, (rows, 3))),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    ranks = on_threads(2, recipe, How(options={"bucketing": "none"}))
    assert_equal(ranks, one_by_one(recipe, 2), "full_shard")

    def rank(comm: Comm, model: nn.Module) -> tuple[str, tuple[int, ...]]:
        sharded = sw.shard(model, comm=comm, bucketing="none")
        assert model.state_dict()["weight"].shape == (3, 3)
        assert model.state_dict()["bias"].shape == (3,)
        return str(sharded.layout), tuple(model.get_parameter("weight").shape)

    (text, first), (_, second) = on_ranks(2, recipe.build, rank)
    assert text.count("padded 3→4 rows on dim 0") == 2
    assert (first, second) == ((2, 3), (1, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_parameter_says_where_its_elements_are(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Sharding]:
        sw.shard(model, strategy, comm=comm)
        for param in model.parameters():
            sharding = param.sharding  # type: ignore[attr-defined]
            assert sharding.stop - sharding.start == param.shape.numel()
        return shardings(model)

    ranks = on_ranks(3, nets.tied_decoder, rank)
    for name, param in seeded(nets.tied_decoder).named_parameters():
        parts = [shardings[name] for shardings in ranks]
        assert {part.name for part in parts} == {name}
        assert {part.shape for part in parts} == {param.shape}
        if strategy == "no_shard":
            assert {part.placement for part in parts} == {"replicated"}
            assert {(part.start, part.stop) for part in parts} == {(0, param.numel())}
        else:
            assert {part.placement for part in parts} == {"fully_sharded"}
            ranges = [(part.start, part.stop) for part in parts if part.start < part.stop]
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == param.numel()
    assert {part.unit for part in ranks[0].values()} == {
        "embed+norm+lm_head", "blocks.0", "blocks.1", "blocks.2"
    }  # fmt: skip


@pytest.mark.parametrize("bucketing", ["none", "layer", "block"])
def test_bucketing_chooses_how_many_collectives_there_are(bucketing: Any) -> None:
    plain = nets.decoder()
    owners = [m for m in plain.modules() if any(True for _ in m.parameters(recurse=False))]
    expected = {"none": len(list(plain.parameters())), "layer": len(owners), "block": 5}[bucketing]

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, bucketing=bucketing)
        assert len(sharded.units) == 5
        batch = nets.decoder_batch(comm.rank, 2)
        comm.counters.reset()
        with torch.no_grad():
            model(batch[0])
        assert comm.counters.calls == {"gather": expected}
        comm.counters.reset()
        train(model, batch)
        assert comm.counters.calls["reduce"] == expected
        assert len(sharded.layout.specs) == expected

    on_ranks(2, nets.decoder, rank)


@pytest.mark.parametrize("bucketing", ["none", "layer"])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_however_buckets_are_cut_training_is_the_same(net: Net, bucketing: str) -> None:
    recipe = Recipe.of(net, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), steps=2)
    ranks = on_threads(3, recipe, How(options={"bucketing": bucketing}))
    assert_equal(ranks, one_by_one(recipe, 3), "full_shard")


# --- which units -----------------------------------------------------------------------------

RULES: dict[str, tuple[Net, sw.wrap.Wrap, list[str]]] = {
    "class": (
        Net(nets.decoder, nets.decoder_batch),
        sw.wrap.by_class(Block),
        ["", "blocks.0", "blocks.1", "blocks.2"],
    ),
    "class names": (
        Net(nets.decoder, nets.decoder_batch),
        sw.wrap.by_class("Block, Table"),
        ["", "embed", "blocks.0", "blocks.1", "blocks.2"],
    ),
    "size": (Net(Digits, digits_batch), sw.wrap.by_size(100), ["", "conv2", "fc1", "fc2"]),
    "hand": (Net(Digits, digits_batch), sw.wrap.by_hand("fc1", "conv2"), ["", "conv2", "fc1"]),
    "whole": (Net(Digits, digits_batch), sw.wrap.whole(), [""]),
}


@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("rule", RULES)
def test_units_are_chosen_by_rule_and_train_alike(rule: str, strategy: str) -> None:
    net, wrap, names = RULES[rule]
    recipe = Recipe.of(net, lambda params: torch.optim.SGD(params, lr=0.1))
    plain = one_by_one(recipe, 2)
    assert_equal(on_threads(2, recipe, How(strategy, wrap)), plain, strategy)

    def rank(comm: Comm, model: nn.Module) -> list[str]:
        return [unit.name for unit in sw.shard(model, wrap=wrap, comm=comm).units]

    assert on_ranks(2, net.build, rank) == [names, names]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("full_shard", "full_shard"),
        ("FULL_SHARD", "full_shard"),
        ("ZeRO-3", "full_shard"),
        ("fsdp", "full_shard"),
        ("SHARD_GRAD_OP", "shard_grad_op"),
        ("zero2", "shard_grad_op"),
        ("ZeRO-1", "zero1"),
        ("NO_SHARD", "no_shard"),
        ("ddp", "no_shard"),
    ],
)
def test_a_strategy_goes_by_the_fields_names(name: str, preset: str) -> None:
    assert sw.shard(toy(), name).placement.name == preset


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "strategy": (
        lambda: sw.shard(toy(), "fullshard"),
        (
            "strategy 'fullshard' does not exist; nearest is 'full_shard'. Choose one of no_shard, "
            "zero1, shard_grad_op, full_shard, hybrid_shard_zero2, hybrid_shard, hybrid_full."
        ),
    ),
    "option": (
        lambda: sw.shard(toy(), bucket="none"),  # type: ignore[call-arg]
        (
            "shard() has no option 'bucket'; nearest is 'bucketing'. Options are "
            "activation_checkpointing, "
        ),
    ),
    "argument": (
        lambda: sw.shard(toy(), strategie="zero1"),  # type: ignore[call-arg]
        "shard() has no option 'strategie'; nearest is 'strategy'. Options are ",
    ),
    "bucketing": (
        lambda: sw.shard(toy(), bucketing="layers"),  # type: ignore[arg-type]
        "bucketing is 'layers'; choose one of 'block', 'layer', 'none'.",
    ),
    "uneven": (
        lambda: sw.shard(toy(), uneven="error"),
        (
            "uneven=\"error\" needs dim-0 shards, and bucketing='block' shards buckets, not "
            'parameters. Add bucketing="none", or leave uneven out.'
        ),
    ),
    "precision": (
        lambda: sw.shard(toy(), precision="bf16"),  # type: ignore[arg-type]
        (
            "precision is 'bf16', and not a Precision. Pass one, for example "
            "sw.Precision(param_dtype=torch.bfloat16)."
        ),
    ),
    "prefetch": (
        lambda: sw.shard(toy(), prefetch=2),  # type: ignore[arg-type]
        "prefetch is 2, and not a Prefetch. Pass one, for example sw.Prefetch(backward=0).",
    ),
    "wrap": (
        lambda: sw.shard(toy(), wrap="Block"),  # type: ignore[arg-type]
        "wrap is 'Block', and not a Wrap. Pass one, for example sw.wrap.by_class('Block').",
    ),
    "lazy": (
        lambda: sw.shard(nn.LazyLinear(3)),
        (
            "2 parameters have no shape yet, the first is 'weight', so they cannot be laid out. "
            "Run the model once, so that its lazy modules learn their shapes."
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_work_is_refused_with_what_can(what: str) -> None:
    do, text = WRONG[what]
    assert error_text(sw.ConfigError, do).startswith(text)


def test_a_model_is_sharded_once() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sw.shard(model, comm=comm)
        again = (model, model.get_submodule("blocks.1"), nn.Sequential(model, nn.Linear(2, 2)))
        return [error_text(sw.ConfigError, lambda: sw.shard(m, comm=comm)) for m in again]  # noqa: B023

    for texts in on_ranks(2, nets.decoder, rank):
        for text, name in zip(
            texts, ("embed.weight", "norm1.weight", "0.embed.weight"), strict=True
        ):
            assert text == (
                f"parameter {name!r} is sharded already, so sharding this model again would cut "
                "shards of shards. Call shard() once, on the outermost model; to shard anew, call "
                "sharded.unshard() first."
            )


def test_ranks_that_are_given_different_things_are_told_which() -> None:
    def frozen(model: nn.Module) -> None:
        model.get_parameter("norm.weight").requires_grad = False

    def deeper(model: nn.Module) -> None:
        model.get_submodule("blocks").append(Block(16))  # type: ignore[operator]

    def untied(model: nn.Module) -> None:
        weight = model.get_parameter("embed.weight")
        model.get_submodule("lm_head").weight = nn.Parameter(weight.detach().clone())

    nothing: Callable[[nn.Module], object] = lambda model: None  # noqa: E731
    cases: list[tuple[Callable[[nn.Module], object], dict[str, Any], str]] = [
        (nothing, {"strategy": "zero1"}, "strategy: ranks 0 and 2: full_shard; rank 1: zero1"),
        (nothing, {"bucketing": "layer"}, "bucketing=layer"),
        (
            nothing,
            {"precision": sw.Precision(reduce_dtype=torch.bfloat16)},
            "reduce_dtype=torch.bfloat16",
        ),
        (nothing, {"wrap": sw.wrap.whole()}, "unit blocks.0: ranks 0 and 2: 2,275 elements"),
        (deeper, {}, "unit blocks.3: ranks 0 and 2: (absent); rank 1: 2,275 elements"),
        (untied, {}, "unit embed+norm+lm_head: ranks 0 and 2: 624 elements"),
        (
            frozen,
            {},
            "'norm.weight': ranks 0 and 2: [16] torch.float32; rank 1: [16] torch.float32, frozen",
        ),
        (
            lambda model: model.requires_grad_(False),
            {},
            "'blocks.0.attention.key.weight': ranks 0 and 2: [16, 16] torch.float32; rank 1: ",
        ),
        (nn.Module.double, {}, "unit blocks.0: "),
    ]
    for change, options, expected in cases:

        def rank(comm: Comm, model: nn.Module) -> str:
            if comm.rank == 1:
                change(model)  # noqa: B023
            mine = options if comm.rank == 1 else {}  # noqa: B023
            text = error_text(sw.RanksDisagree, lambda: sw.shard(model, comm=comm, **mine))
            assert shardings(model) == {}  # nothing was cut yet
            return text

        for text in on_ranks(3, nets.tied_decoder, rank):
            assert "not the same on all ranks:" in text.partition("\n")[0]
            assert expected in text


# --- who the ranks are -----------------------------------------------------------------------


def test_without_a_launcher_there_is_one_rank() -> None:
    plain, model = seeded(nets.decoder), seeded(nets.decoder)
    sharded = sw.shard(model)
    assert (sharded.comm.rank, sharded.comm.size, sharded.comm.device.type) == (0, 1, "cpu")
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters())
        for step in range(3):
            train(one, nets.decoder_batch(step, 2))
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model.state_dict(), clones(plain.state_dict()))
    assert sharded.comm.counters.calls == {}


def over_a_mesh(comm: Comm) -> dict[str, Tensor]:
    """Over a mesh, over a group, and over what there is: with the comm that ``shard`` makes."""
    mesh, states = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), []
    for options in ({"mesh": mesh}, {"mesh": mesh["shard"]}, {"mesh": dist.group.WORLD}, {}):
        model = seeded(nets.decoder)
        sharded = sw.shard(model, **options)
        assert (sharded.comm.rank, sharded.comm.size) == (comm.rank, 2)
        train(model, nets.decoder_batch(comm.rank, 2))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        states.append(model.state_dict())
        sharded.comm.close()
    assert all(equal(state, states[0]) for state in states)
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert "uses one axis, and the mesh has two, (1, 2)" in error_text(
        sw.ConfigError, lambda: sw.shard(nets.decoder(), mesh=two)
    )
    model = seeded(nets.decoder)
    with sw.shard(model, "hybrid_shard", mesh=two).comm:
        train(model, nets.decoder_batch(comm.rank, 2))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert equal(model.state_dict(), states[0])
    return states[0]


@pytest.mark.spawn
def test_the_ranks_may_be_a_mesh_or_a_group() -> None:
    recipe = Recipe(
        nets.decoder,
        lambda seed, rows: nets.decoder_batch(seed // 100 % 100, rows),
        lambda params: torch.optim.SGD(params, lr=0.1),
        steps=1,
    )
    plain = one_by_one(recipe, 2)
    for state in run_processes(2, over_a_mesh):
        assert equal(state, plain.states[0])


# --- afterwards ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_models_dtype_is_fixed_once_it_is_sharded(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        batch = nets.decoder_batch(comm.rank, 2)
        before = clones(model.state_dict())
        model.float().cpu().to(torch.float32)  # nothing changes
        assert equal(model.state_dict(), before)

        text = error_text(sw.ConfigError, model.half)
        assert equal(model.state_dict(), before)  # it is refused before anything changes
        train(model, batch)
        return text

    for world in (1, 2):
        for text in on_ranks(world, nets.decoder, rank):
            assert "the model was to be converted to torch.float16 on cpu" in text
            assert "convert the model before shard()" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_that_are_put_in_place_of_a_shard_are_taken_over(strategy: str) -> None:
    """As weight initialisers, pruning and some averaging code do: ``param.data = …``."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        train(model, nets.decoder_batch(comm.rank, 2))
        model.zero_grad()
        for param in model.parameters():
            param.data = torch.full_like(param.data, 0.5)
        halves = {name: torch.full_like(v, 0.5) for name, v in model.state_dict().items()}
        assert equal(dict(model.state_dict()), halves)
        plain = nets.decoder()
        plain.load_state_dict(halves)
        batch = nets.decoder_batch(0, 2)
        assert torch.equal(nets.loss(model, batch), nets.loss(plain, batch))
        for one in (plain, model):  # and it trains from there
            train(one, batch)
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        assert equal(model.state_dict(), clones(plain.state_dict()))
        assert sharded.unshard() is model

    on_ranks(2, nets.decoder, rank)


def test_two_models_train_against_each_other() -> None:
    def generator() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))

    def critic() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def play(maker: nn.Module, judge: nn.Module) -> None:
        makes = torch.optim.Adam(maker.parameters(), lr=0.01)
        judges = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            noise, real = nets.numbers(step, (4, 3)), nets.numbers(step + 9, (4, 5))
            judges.zero_grad()
            (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
            judges.step()
            makes.zero_grad()
            judge(maker(noise)).mean().neg().backward()  # gradients for both, one steps
            makes.step()

    plain = seeded(generator), seeded(critic, seed=1)
    start = clones(plain[0].state_dict()), clones(plain[1].state_dict())
    play(*plain)

    def rank(comm: Comm, strategy: str) -> None:
        pair = generator(), critic()
        for model, state in zip(pair, start, strict=True):
            model.load_state_dict(state)
            sw.shard(model, strategy, sw.wrap.by_class(nn.Linear), comm)
        play(*pair)
        for model, other in zip(pair, plain, strict=True):
            assert equal(model.state_dict(), clones(other.state_dict()))

    for strategy in STRATEGIES:
        run_threads(2, rank, strategy)


class Withholding(torch.autograd.Function):
    """Its backward has nothing to say about its parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * 2, None


class Withheld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = Withholding.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_whose_function_gives_no_gradient_is_like_an_unused_one(strategy: str) -> None:
    batches = [(nets.numbers(r, (2, 4)), nets.numbers(r + 9, (2, 4))) for r in range(2)]
    truth = averaged(seeded(Withheld), train, batches)
    assert truth["weight"] is None

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, strategy, comm=comm)
        for _ in range(2):
            train(model, batches[comm.rank])
            assert_gradients(model, truth)
            model.zero_grad()

    on_ranks(2, Withheld, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_goes_with_its_handle(strategy: str) -> None:
    """Nothing in this process keeps its memory: no hook of torch's, no cycle that gc cannot see."""

    def rank(comm: Comm) -> list[weakref.ref[Any]]:
        model = models[comm.rank]
        models[comm.rank] = nn.Identity()
        sharded = sw.shard(model, strategy, comm=comm, activation_checkpointing=True)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, nets.decoder_batch(comm.rank, 2))
        optimizer.step()
        model.state_dict()
        bucket = sharded.buckets[0]
        things = (model, sharded, bucket, bucket.shard, next(model.parameters()))
        return [weakref.ref(thing) for thing in things]

    models: list[nn.Module] = [seeded(nets.decoder) for _ in range(2)]
    ranks = run_threads(2, rank)
    gc.collect()
    assert [ref() for refs in ranks for ref in refs] == [None] * 10


def test_a_model_lives_without_its_handle() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        gc.collect()
        train(model, nets.decoder_batch(comm.rank, 2))
        assert all(param.grad is not None for param in model.parameters())

    on_ranks(2, nets.decoder, rank)


# --- looking ---------------------------------------------------------------------------------


def test_the_handle_counts_the_elements_of_the_whole_model() -> None:
    """So does each parameter, whose shape is that of its shard. What is trained may change."""
    plain = nets.mostly_frozen()
    whole = sum(param.numel() for param in plain.parameters())
    first, *others = [param.numel() for param in plain.parameters() if param.requires_grad]

    def rank(comm: Comm, model: nn.Module) -> int:
        sharded = sw.shard(model, comm=comm)
        assert (sharded.numel(), sharded.numel(trainable_only=True)) == (whole, first + sum(others))
        next(p for p in model.parameters() if p.requires_grad).requires_grad = False
        assert (sharded.numel(), sharded.numel(trainable_only=True)) == (whole, sum(others))
        assert sum(param.numel() for param in model.parameters()) == whole
        return sum(param.shape.numel() for param in model.parameters())

    assert sum(on_ranks(3, nets.mostly_frozen, rank)) == whole


def test_units_layout_schedule_and_handle_read_as_text() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[str, str, str, str]:
        sharded = sw.shard(model, comm=comm, bucketing="none")
        return repr(sharded), str(sharded.units), str(sharded.layout), str(sharded.schedule)

    handle, units, layout, schedule = on_ranks(2, lambda: nn.Linear(3, 3), rank)[0]
    assert handle == "Sharded(Linear, full_shard, rank 0 of 2, 1 unit, 12 parameters)"
    assert units.splitlines() == [
        "unit    class   parameters  bytes  trainable  padding  placement",
        "(root)  Linear          12     48         12       16  sharded",
        "total                   12     48         12       16",
    ]
    assert "2 shards of 6, padding 3 (33.33%): padded 3→4 rows on dim 0" in layout
    assert "a0 a1 a2 a3 a4 a5 | a6 a7 a8 ·  ·  ·" in layout
    assert schedule.startswith("# one step (train) of full_shard on 2 ranks: 1 gather, 1 reduce, ")


def test_a_model_without_parameters_is_a_model() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sharded = sw.shard(model, comm=comm)
        assert len(sharded.units) == 0
        out: Tensor = model(torch.ones(2, requires_grad=True))
        out.sum().backward()
        return out

    for out in on_ranks(2, nn.ReLU, rank):
        assert torch.equal(out, torch.ones(2))


def test_what_takes_long_or_keeps_one_copy_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, "hybrid_shard", comm=comm, compile="eager")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "shardwise"):
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        on_ranks(2, nets.decoder, rank)
    assert [record.getMessage() for record in caplog.records] == [
        "2 ranks on one host: hybrid_shard keeps one copy of the model, as full_shard does",
        "the first step compiles 5 units, which may take minutes",
    ]


def test_a_mode_that_no_step_has_is_answered_with_those_there_are() -> None:
    with pytest.raises(sw.ConfigError, match=r"mode is 'eval', and a step is one of .*'forward'"):
        sw.shard(nn.Linear(2, 2)).schedule_of("eval")
