"""A recipe as a question: its settings are those that it has written."""

from __future__ import annotations

from pathlib import Path

from shardwise.config.prefetch import Prefetch
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.planner import Planner
from shardwise.train.memory_estimate import predict
from shardwise.train.question import chosen_by, model_of, question_of, with_loss_in_head
from tests.train.tiny import tiny_recipe


def test_what_no_candidate_says_is_as_it_is_written(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        "sharding.strategy=zero1",
        "sharding.activation_checkpointing=2",
        "sharding.unsharded=[Block]",
        "sharding.prefetch.backward=0",
    )
    written = (("unsharded", ("Block",)), ("prefetch", Prefetch(None, 0)))
    assert chosen_by(recipe) == Candidate("zero1", 1, recompute=2, written=written)


def test_a_moving_average_is_state_of_the_optimizer(tmp_path: Path) -> None:
    recipes = tiny_recipe(tmp_path), tiny_recipe(tmp_path, "optimizer.ema=0.9")
    model, machine = model_of(recipes[0], 300), known().machine("L4", 1)
    plain, averaged = (
        Planner(question_of(recipe, model, machine, 1)).forecast(Candidate("full_shard", 12))
        for recipe in recipes
    )
    more = averaged.memory.by_kind["optimizer"] - plain.memory.by_kind["optimizer"]
    assert more == sum(4 * param.numel() for param in model.parameters())


def test_so_are_the_start_and_the_momentum_of_workers_that_train_apart(tmp_path: Path) -> None:
    outer = "outer={method: diloco, workers: [127.0.0.1:1, 127.0.0.1:2], worker: 0, every: 9}"
    plain, apart = tiny_recipe(tmp_path), tiny_recipe(tmp_path, outer)
    averages = tiny_recipe(tmp_path, outer, "outer.outer_momentum=0", "optimizer.ema=0.9")
    numel = sum(param.numel() for param in model_of(plain, 300).parameters())
    state = [predict(recipe, 1, 300).optimizer for recipe in (plain, apart, averages)]
    assert [more - state[0] for more in state] == [0, 8 * numel, 8 * numel]


def test_a_loss_in_the_head_computes_the_same_and_keeps_less(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "batch.micro=6", "data.context=256")
    machine = known().machine("L4", 2)
    plain, in_head = (
        Planner(change(question_of(recipe, model_of(recipe, 2_000), machine, 2)))
        for change in (lambda question: question, with_loss_in_head)
    )
    candidate = chosen_by(recipe)
    assert plain.time(candidate).work.flops == in_head.time(candidate).work.flops
    most, less = (planner.forecast(candidate).memory.peak for planner in (plain, in_head))
    assert less < 0.7 * most
