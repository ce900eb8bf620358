"""Estimates from a few blocks agree with forecasts of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.prefetch import Prefetch
from shardwise.errors import ConfigError
from shardwise.plan.forecast import observe, repeated
from shardwise.plan.forecast.candidate import OFFLOADS, Candidate, savings
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.planner import Forecast, Planner
from shardwise.plan.forecast.question import Inputs, Question
from shardwise.plan.forecast.work import StepWork
from shardwise.plan.units.wrap import Wrap, automatic, whole
from tests.plan.forecast.test_repeated import EACH_ALONE, decoder
from tests.plan.forecast.test_search import planner_of, question

LAYER = sum(param.nbytes for param in decoder().get_submodule("model.layers.0").parameters())


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
def test_memory_and_time_of_all_blocks_follow_from_a_few(
    strategy: str, recompute: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = Candidate(strategy, 4, recompute=recompute)
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "FEWEST", 1000)  # all blocks are observed
        whole = Planner(question()).forecast(candidate)
    planner = Planner(question())
    forecast = planner.forecast(candidate)
    assert forecast.memory.peak == whole.memory.peak
    assert forecast.time.seconds == pytest.approx(whole.time.seconds)
    assert planner.peak(candidate).device == pytest.approx(whole.memory.peak, rel=0.02)
    assert planner.seconds(candidate) == pytest.approx(whole.time.seconds, rel=0.05)


@pytest.mark.parametrize("rule", [automatic(joined_nbytes=2 * LAYER), whole()], ids=str)
def test_blocks_that_share_a_unit_are_forecast_as_they_are(rule: Wrap) -> None:
    planner = Planner(replace(question(), arguments={"wrap": rule}))
    for strategy in ("no_shard", "full_shard"):
        candidate = Candidate(strategy, 4)
        forecast = planner.forecast(candidate)
        assert planner.peak(candidate).device == forecast.memory.peak
        assert planner.seconds(candidate) == forecast.time.seconds


def test_estimates_of_several_micro_batches_are_exact_at_each() -> None:
    planner = Planner(question())
    for rows in (1, 2, 8):
        candidate = Candidate("full_shard", rows)
        whole = planner.forecast(candidate).memory
        assert planner.peak(candidate).device == pytest.approx(whole.peak, rel=0.02)
        assert planner.activations(candidate) < whole.peak


@pytest.mark.parametrize("strategy", ["zero1", "shard_grad_op", "full_shard"])
def test_estimates_are_of_the_micro_batch_that_takes_most(strategy: str) -> None:
    planner = planner_of(8, 64)
    for rows, recompute in product((1, 4), (0, 1, 2)):
        candidate = Candidate(strategy, rows, recompute=recompute)
        whole = planner.forecast(candidate).memory
        assert planner.peak(candidate).device == pytest.approx(whole.peak, rel=0.02), candidate


@pytest.mark.parametrize("recompute", [0, 1])
def test_estimates_on_a_cpu_that_was_measured_are_of_the_process(recompute: int) -> None:
    machine = question().machine
    own = replace(machine.accelerator, device="cpu", kept=0.24, recomputing=10**8)
    asked = replace(question(), machine=replace(machine, accelerator=own))
    for offload in OFFLOADS:
        planner, candidate = Planner(asked), Candidate("full_shard", 4, None, recompute, offload)
        held = planner.forecast(candidate).memory.held(own)
        assert sum(planner.peak(candidate)) == pytest.approx(held, rel=0.02)


def test_a_rank_that_is_alone_on_an_axis_shares_no_memory_there() -> None:
    copies, of_two = Candidate("hybrid_full", 1, mesh=(2, 1)), question(ranks=2)
    (apart,) = Planner(of_two).memories(copies, alone=True)
    (beside,) = Planner(replace(of_two, shared=True)).memories(copies, alone=True)
    for kind in (Kind.GATHERED, Kind.JOINED, Kind.PARAMETERS):
        assert beside.most[kind] == apart.most[kind] > 0


def test_ranks_of_one_host_alone_share_memory() -> None:
    copies, of_all = Candidate("hybrid_full", 1, mesh=(4, 4)), question(ranks=16)
    own = replace(of_all.machine.accelerator, device="cpu")
    machine = replace(of_all.machine, accelerator=own, per_host=4)
    apart = Planner(replace(of_all, machine=machine))
    of_hosts, of_one = (
        apart.about(replace(of_all, machine=replace(machine, per_host=ranks), shared=True))
        for ranks in (4, 16)
    )

    def received(planner: Planner) -> int:
        (memory,) = planner.memories(copies, alone=True)
        return memory.most.get(Kind.COMMUNICATION, 0)

    assert received(apart) > received(of_hosts) > received(of_one) == 0
    whole = Candidate("full_shard", 1)
    peaks = [planner.memories(whole)[0].peak for planner in (apart, of_hosts)]
    assert peaks[0] == peaks[1]


def test_what_a_recipe_has_written_is_judged_as_it_is() -> None:
    planner = Planner(question())
    plain, kept, late = (
        planner.forecast(Candidate("full_shard", 1, written=written)).memory.peak
        for written in ((), (("unsharded", "model.layers.*"),), (("prefetch", Prefetch(0, 0)),))
    )
    assert kept > plain > late


def test_units_that_a_recipe_keeps_unsharded_need_not_stay() -> None:
    written = ("prefetch", Prefetch(0, 0)), ("unsharded", "model.layers.*")
    fix = dict(savings(Candidate("full_shard", 1, written=written)))["no unit unsharded"]
    assert fix.written == written[:1]


def test_a_recipe_sets_all_that_was_chosen() -> None:
    chosen = Candidate("hybrid_shard", 2, (4, 8), 2, "optimizer", unsharded=0.5, prefetch=2)
    keys = Planner(question(32)).recipe(chosen)
    ahead = keys.pop("sharding.prefetch.forward")
    assert ahead == keys.pop("sharding.prefetch.backward") > 0
    assert keys.pop("sharding.unsharded") > 0
    assert keys == {
        "sharding.strategy": "hybrid_shard",
        "batch.micro": 2,
        "sharding.activation_checkpointing": 2,
        "sharding.offload": "optimizer",
        "sharding.mesh": [4, 8],
    }


class Block(nn.Module):
    """A unit of its own wherever parameters are kept sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return x + y


class Blocks(nn.Module):
    """Ten blocks that are alike; ``path`` says how one calls them."""

    def __init__(self, path: Callable[[Blocks, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(10))
        self.more = nn.ModuleList(nn.Linear(256, 256) for _ in range(10))
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return self.path(self, x)


def in_order(model: Blocks, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def by_number(model: Blocks, x: Tensor) -> Tensor:
    for number in range(10):
        x = model.layers[number](x)
    return x


def beside_another_list(model: Blocks, x: Tensor) -> Tensor:
    for layer, more in zip(model.layers, model.more, strict=False):
        x = more(layer(x))
    return x


def twice(model: Blocks, x: Tensor) -> Tensor:
    for layer in (*model.layers, *model.layers):
        x = layer(x)
    return x


def backwards(model: Blocks, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def all_kept(model: Blocks, x: Tensor) -> Tensor:
    outputs = [x]
    for layer in model.layers:
        outputs.append(layer(torch.stack(outputs).sum(0)))
    return torch.stack(outputs).mean(0)


def every_fifth(model: Blocks, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x.exp().log() if number % 5 == 4 else x)
    return x


def question_of(path: Callable[[Blocks, Tensor], Tensor]) -> Question:
    with torch.device("meta"):
        model = Blocks(path)

    def inputs(rows: int) -> Inputs:
        return (torch.zeros(rows * 64, 256, device="meta"),), {}

    return Question(model, inputs, known().machine("L4", 2), 2)


@pytest.mark.parametrize(
    "path", [by_number, beside_another_list, twice, backwards, all_kept, every_fifth]
)
def test_few_blocks_stand_for_all_only_where_a_step_of_all_says_so(
    path: Callable[[Blocks, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = question_of(path)
    candidate = Candidate("full_shard", 4)
    planner = Planner(question)
    planner.peak(candidate)  # an estimate: only from then on may few blocks stand for all
    planned = planner.forecast(candidate)
    monkeypatch.setattr(repeated, "FEWEST", 100)
    assert planned == Planner(question).forecast(candidate)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of blocks of which a backward pass was observed."""
    blocks, plain = set[int](), observe.observe

    def noted(model: Blocks, *args: Any) -> StepWork:
        work = plain(model, *args)
        if any(unit.backward.kernels for unit in work.units.values()):
            blocks.add(len(model.layers))
        return work

    monkeypatch.setattr("shardwise.plan.forecast.planner.observe", noted)
    return blocks


@cache
def table(device: torch.device) -> Tensor:
    return torch.ones(256, device=device)


def by_a_table_of_the_process(model: Blocks, x: Tensor) -> Tensor:
    return in_order(model, x * table(x.device))


PATHS = [(in_order, 4), (by_a_table_of_the_process, 4), (every_fifth, 10)]


@pytest.mark.parametrize(("path", "blocks"), PATHS)
def test_where_few_blocks_stand_for_all_only_they_are_trained(
    path: Callable[[Blocks, Tensor], Tensor], blocks: int, trained: set[int]
) -> None:
    planner = Planner(question_of(path))
    for rows in (1, 4):
        planner.peak(Candidate("full_shard", rows))
    assert trained == {blocks}


def after_a_hole(model: Blocks, x: Tensor) -> Tensor:
    """In a heap the first blocks fill what ``repeat`` leaves, and later ones find it full."""
    return in_order(model, x + x.repeat(30, 1).sum())


@pytest.mark.parametrize(("kept", "blocks"), [(None, 4), (0.5, 10)])
def test_holes_of_a_heap_tell_blocks_apart_only_where_there_is_a_heap(
    kept: float | None, blocks: int, trained: set[int]
) -> None:
    question = question_of(after_a_hole)
    accelerator = replace(question.machine.accelerator, kept=kept)
    machine = replace(question.machine, accelerator=accelerator)
    Planner(replace(question, machine=machine)).peak(Candidate("full_shard", 1))
    assert trained == {blocks}


def test_blocks_that_share_units_unless_they_are_recomputed(trained: set[int]) -> None:
    joined = {"wrap": automatic(joined_nbytes=3 * 4 * 256 * 1024 * 2)}
    planner = Planner(replace(question_of(in_order), arguments=joined))
    planner.peak(Candidate("full_shard", 4, recompute=1))
    assert trained == {4}
    planner.peak(Candidate("full_shard", 4))
    assert trained == {4, 10}


def test_a_process_on_cpu_holds_more_than_its_tensors_take_at_once() -> None:
    planner = Planner(question())
    candidates = (Candidate("full_shard", 4, recompute=n) for n in (0, 1))
    plain, recomputed = (planner.forecast(candidate).memory for candidate in candidates)
    gpu = planner.question.machine.accelerator
    cpu = replace(gpu, kept=0.5, recomputing=10**6)
    assert plain.held(gpu) == plain.peak
    assert plain.held(cpu) == plain.process(0.5) > plain.peak
    assert recomputed.held(cpu) == recomputed.process(0.5) + 10**6


class OneByOne(nn.Module):
    """A recurrence: three kernels for each token, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, tokens, 4]`` → ``[rows, 4]``."""
        state = x[:, 0]
        for block in self.blocks:
            for token in x.unbind(1):
                state = torch.tanh(block(state) + token)
        return state


def test_a_model_that_computes_one_token_after_the_other_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.plan.forecast.recording.MOST_KERNELS", 500)

    def plan(tokens: int) -> Forecast:
        def given(rows: int) -> Inputs:
            return (torch.zeros(rows, tokens, 4),), {}

        question = Question(
            OneByOne(), given, known().machine("L4", 1), 1, arguments={"wrap": EACH_ALONE}
        )
        return Planner(question).forecast(Candidate("no_shard", 1))

    assert plan(4).memory.peak > 0
    with pytest.raises(ConfigError, match=r"more than 500 kernels.* one token after .*--seq 32"):
        plan(64)
