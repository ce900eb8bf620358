"""Epochs as steps: how long a run is, and when it validates, saves and ends early."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.cli.watch import phase
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.report.facts import results
from shardwise.report.run import read_run
from shardwise.train.length import in_steps, is_multiple, notes, times_due
from shardwise.train.records import Built, Complete, Evaluated, Prepared, Saved, Stepped, Warned
from shardwise.train.validation import Validation
from tests.train.runs import Watched, losses
from tests.train.tiny import tiny_recipe

ROWS = 100  # of the training split; a step takes 16


def recipe(run: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"batch": {"rows": 16}, "run": run} | sections)


def validated(recipe: Recipe) -> list[int]:
    """The steps after which a run validates, its last one always."""
    run = recipe.run
    steps = range(1, run.steps + 1)
    due = [s for s in steps if is_multiple(s, run.eval_every) and s >= run.eval_delay]
    return sorted({*due, run.steps})


@pytest.mark.parametrize(("epochs", "steps"), [(1, 7), (2, 13), (3, 19), (0.5, 4), (0.01, 1)])
def test_a_run_of_epochs_ends_when_every_row_was_seen_as_often(epochs: float, steps: int) -> None:
    assert in_steps(recipe({"epochs": epochs}, optimizer={"warmup": 0}), ROWS).run.steps == steps


@pytest.mark.parametrize("epochs", [1.1, 2.2, 4.1, 0.07, 0.29, 3])
def test_epochs_are_the_decimal_number_that_is_written(epochs: float) -> None:
    """As binary fractions 1.1 × 100 and the others are a little more than a whole number."""
    every = {"epochs": epochs, "eval_every": "epoch", "eval_delay": epochs}
    run = in_steps(recipe(every, batch={"rows": 1}), ROWS).run
    assert run.steps == run.eval_delay == round(epochs * 100)


def test_without_epochs_nothing_changes() -> None:
    stepped = recipe({"steps": 30, "eval_every": 10, "eval_delay": 15})
    assert in_steps(stepped, ROWS) == stepped
    assert validated(stepped) == [20, 30]


@pytest.mark.parametrize(("delay", "steps"), [(0, [7, 13]), (1, [7, 13]), (1.5, [13]), (2, [13])])
def test_the_first_validation_waits_for_its_epoch(delay: float, steps: list[int]) -> None:
    run = {"epochs": 2, "eval_every": "epoch", "eval_delay": delay}
    stepped = in_steps(recipe(run, optimizer={"warmup": 0}), ROWS)
    assert validated(stepped) == steps
    assert bool(list(notes(stepped))) == (len(steps) == 1)


def test_the_only_validation_is_noted_and_so_is_saving_by_epoch() -> None:
    run = {"epochs": 2, "eval_every": "epoch", "eval_delay": 2}
    stepped = in_steps(
        recipe(run, checkpoint={"save_every": "epoch"}, optimizer={"warmup": 0}), ROWS
    )
    (note,) = notes(stepped)
    assert "one validation, after the last of 13 steps" in note
    assert stepped.checkpoint.save_every == 7


@pytest.mark.parametrize("chosen", [{"run": {"patience": 1}}, {"checkpoint": {"keep_best": True}}])
@pytest.mark.parametrize(
    ("interval", "key"),
    [
        ({"eval_every": 10}, "run.eval_every"),
        ({"eval_every": 5}, "run.eval_every"),
        ({"eval_every": 10, "eval_delay": 1}, "run.eval_every"),
        ({"eval_every": 2, "eval_delay": 5}, "run.eval_delay"),
        ({"eval_every": 2, "eval_delay": 4}, None),
        ({"eval_every": 4}, None),
    ],
)
def test_where_the_best_of_one_validation_is_chosen_the_key_that_leaves_one_is_named(
    chosen: dict[str, dict[str, Any]], interval: dict[str, int], key: str | None
) -> None:
    run = {"steps": 5, **interval, **chosen.get("run", {})}
    others = {"optimizer": {"warmup": 0}, "checkpoint": chosen.get("checkpoint", {})}
    noted = list(notes(recipe(run, **others)))
    assert [note.split()[0] for note in noted] == [key] * (key is not None)


@pytest.mark.parametrize(
    ("every", "length", "note"),
    [
        (13, {"epochs": 2}, None),
        (14, {"epochs": 2}, "outer.every is 14 and the run has 13 steps: .* outer.every: 13, or"),
        (4, {"epochs": 2}, "what workers train after step 12 they do not exchange"),
        (4, {"steps": 7}, "what workers train after step 4 they do not exchange"),
        (4, {"steps": 8}, None),
    ],
)
def test_workers_exchange_at_least_once_and_are_told_what_they_do_not_exchange(
    every: int, length: dict[str, int], note: str | None
) -> None:
    outer = {"method": "diloco", "workers": ["a:1", "b:1"], "every": every}
    given = recipe(length, outer=outer, optimizer={"warmup": 0})
    if every > 13:
        with pytest.raises(ConfigError, match=note):
            in_steps(given, ROWS)
        return
    noted = list(notes(in_steps(given, ROWS)))
    assert len(noted) == (note is not None)
    assert all(note is not None and note in each for each in noted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"run": {"patience": 2}}, "run.patience is 2 and run.eval_every is 0"),
        ({"run": {"eval_delay": 2}}, "run.eval_delay is 2.* and run.eval_every is 0"),
        (
            {"run": {"epochs": 2}, "data": {"max_bytes": 9, "streaming": {"streams": 4}}},
            "run.epochs is 2, and how long streamed text is, is not known; set data.streaming",
        ),
    ],
)
def test_what_would_have_no_effect_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate(fields)


def test_a_warm_up_longer_than_the_run_ends_with_its_last_step_and_is_noted() -> None:
    stepped = in_steps(recipe({"epochs": 2}), ROWS)
    (note,) = notes(stepped)
    assert note.startswith("optimizer.warmup is 20 and the run has 13 steps: ")
    assert stepped.optimizer.warmup_steps(13) == 12
    assert stepped.optimizer.warmup_steps(1) == 0


def test_a_run_of_epochs_is_finished_or_goes_on_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    options = ("run.eval_every=epoch", "checkpoint.save_every=epoch", "optimizer.warmup=0.1")

    def run(epochs: int) -> int:
        watched.records.clear()
        changed = tiny_recipe(
            tmp_path, f"run.epochs={epochs}", "batch.rows=40", "batch.micro=20", *options
        )
        return watched.run(changed, world=2).step

    steps = run(1)
    (prepared,), (built,) = watched.kind(Prepared), watched.kind(Built)
    assert steps == math.ceil(prepared.rows[0] / 40) == built.steps > 2
    assert built.warmup == math.ceil(steps * 0.1)
    assert [record.step for record in watched.kind(Evaluated)] == [steps]
    assert run(1) == steps
    assert watched.records == [Complete(str(tmp_path / "run"), steps)]
    more = run(2)
    assert steps < more <= 2 * steps
    assert [record.step for record in watched.kind(Stepped)] == [*range(steps + 1, more + 1)]
    assert [record.step for record in watched.kind(Saved)] == [more]


@pytest.mark.prove
def test_a_run_whose_validations_do_not_improve_ends_and_stays_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    evaluate = Validation.evaluate
    lowest = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.0}  # the best is the second; equal is not better

    def given(self: Validation, *arguments: Any) -> Evaluated:
        evaluated = evaluate(self, *arguments)
        return replace(evaluated, loss=lowest.get(evaluated.step, 9.0))

    monkeypatch.setattr(Validation, "evaluate", given)
    early = ("run.steps=9", "run.eval_every=1", "run.patience=2", "sample.tokens=0")
    patient = tiny_recipe(tmp_path, *early)
    outcome = watched.run(patient, world=3)
    assert (outcome.step, outcome.stopped) == (4, False)
    assert [record.step for record in watched.kind(Saved)] == [4]
    (warned,) = watched.kind(Warned)
    assert "2.0000, is 2 validations ago (run.patience), so the run ends at step 4 of 9" in (
        warned.message
    )
    early_end = "finished early: the lowest validation loss, 2.0000, is 2 validations ago"
    logged = read_run(Path(patient.run.folder))
    assert phase(logged, is_running=False, now=0.0).startswith(early_end)
    assert dict(results([logged]))["ended"].startswith(early_end)
    before = losses(patient)
    assert watched.run(patient, world=2).step == 4
    assert losses(patient) == before
    assert watched.run(tiny_recipe(tmp_path, *early[:2], "run.patience=4"), world=1).step == 6
    (tmp_path / "unsaved").mkdir()
    unsaved = tiny_recipe(tmp_path / "unsaved", *early, "checkpoint.save_every=0")
    assert [watched.run(unsaved, world=1).step for _ in range(2)] == [4, 4]


def test_results_have_the_names_and_values_that_trainer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    tiny = tiny_recipe(tmp_path, "run.throughput_warmup=1")
    watched.run(tiny, world=2)
    (prepared,) = watched.kind(Prepared)
    last = watched.kind(Evaluated)[-1]
    train, evaluation = (
        json.loads((tmp_path / "run" / f"{name}_results.json").read_text("utf-8"))
        for name in ("train", "eval")
    )
    steps = [record.loss for record in watched.kind(Stepped)]
    assert train["train_loss"] == pytest.approx(sum(steps) / 4, rel=1e-12)
    assert train["train_samples"] == prepared.rows[0]
    assert train["epoch"] == evaluation["epoch"] == 4 * 12 / prepared.rows[0]
    assert train["train_samples_per_second"] == pytest.approx(train["train_steps_per_second"] * 12)
    speed = pytest.approx(train["train_samples_per_second"] * 16)
    assert train["train_tokens_per_second"] == speed
    assert evaluation["eval_loss"] == last.loss
    assert evaluation["eval_accuracy"] == last.accuracy
    assert evaluation["perplexity"] == math.exp(last.loss)
    assert evaluation["eval_samples"] == 7


@pytest.mark.parametrize("every", [0, 1, 2, 3, 7, 10, 40])
@pytest.mark.parametrize("delay", [0, 4, 30])
def test_how_often_something_is_still_due_is_counted(every: int, delay: int) -> None:
    last = 20
    for step in range(1, last + 1):
        due = {s for s in range(step, last + 1) if is_multiple(s, every) and s >= delay}
        assert times_due(step, last, every, delay) == len(due | {last})
