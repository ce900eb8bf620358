"""A run that was interrupted is the run that was not: the same rows, losses, and bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train.records import Evaluated, Resumed, Saved, Stepped, Stopped, Warned
from shardwise.train.requests import Request, SignalRequests
from tests.train.runs import Watched, digest, lines, losses, saved, steps
from tests.train.tiny import tiny_recipe

SHORT = ("run.steps=6", "sample.tokens=0", "checkpoint.save_every=2", "batch.micro=2")


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return tiny_recipe(folder, *SHORT, *overrides)


class Signalled(SignalRequests):
    """What a rank is asked for whom a signal to stop reaches during step ``at``."""

    at = 0

    def take(self, step: int) -> Request:
        if step == self.at:
            self.stop()
        return super().take(step)


def stop_of(rank: int, step: int) -> Callable[[Comm], SignalRequests]:
    """Only this rank is asked to stop."""
    requests = Signalled()
    requests.at = step
    return lambda comm: requests if comm.rank == rank else SignalRequests()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


# --- the same number of ranks ----------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [pytest.param(1, marks=pytest.mark.prove), 2, pytest.param(3, marks=pytest.mark.prove)],
)
def test_killed_in_any_micro_batch_it_comes_to_the_same_bits(
    number: int, tmp_path: Path, watched: Watched
) -> None:
    whole = recipe_in(tmp_path / "whole")
    watched.run(whole, 2)
    rows = watched.rows(6)
    watched.trained.clear()
    cut = recipe_in(tmp_path / "cut")
    watched.killed(cut, 2, at=(4, 1, number))
    watched.records.clear()
    outcome = watched.run(cut, 2)
    assert (outcome.step, outcome.stopped, outcome.save_error) == (6, False, "")
    assert steps(watched.records) == [3, 4, 5, 6]
    assert losses(cut) == losses(whole)
    assert watched.rows(6) == rows
    assert digest(cut, 6) == digest(whole, 6)


@pytest.mark.prove
def test_stopped_by_one_rank_at_any_step_it_comes_to_the_same_bits(
    tmp_path: Path, watched: Watched
) -> None:
    whole, cut = recipe_in(tmp_path / "whole"), recipe_in(tmp_path / "cut")
    watched.run(whole, 3)
    rows = watched.rows(6)
    watched.trained.clear()
    for step in (1, 3, 4):
        outcome = watched.run(cut, 3, ask=stop_of(1, step))
        assert (outcome.step, outcome.stopped) == (step, True)
        assert f"step-{step}" in saved(cut)
    outcome = watched.run(cut, 3)
    assert not outcome.stopped
    assert [stop.step for stop in watched.kind(Stopped)] == [1, 3, 4]
    assert [back.step for back in watched.kind(Resumed)] == [1, 3, 4]
    assert losses(cut) == losses(whole)
    assert watched.rows(6) == rows
    assert digest(cut, 6) == digest(whole, 6)


@pytest.mark.prove
def test_the_scale_of_a_float16_run_is_halved_where_it_overflows_and_is_saved(
    tmp_path: Path, watched: Watched
) -> None:
    scaled = ("sharding.precision=fp16", f"optimizer.loss_scale={2**19}")
    whole, cut = (recipe_in(tmp_path / name, *scaled) for name in ("whole", "cut"))
    watched.run(whole, 2)
    steps_taken = watched.kind(Stepped)
    assert {step.skipped for step in steps_taken} == {True, False}
    for before, after in pairwise(steps_taken):
        assert before.loss_scale is not None
        assert after.loss_scale == before.loss_scale * (0.5 if before.skipped else 1)
    watched.run(cut, 2, ask=stop_of(1, 3))
    watched.run(cut, 2)
    assert losses(cut) == losses(whole)
    assert digest(cut, 6) == digest(whole, 6)


@pytest.mark.prove
def test_saved_in_the_background_it_comes_to_the_same_bits(
    tmp_path: Path, watched: Watched
) -> None:
    whole = recipe_in(tmp_path / "whole")
    watched.run(whole, 2)
    cut = recipe_in(tmp_path / "cut", "checkpoint.asynchronous=true")
    watched.records.clear()
    watched.run(cut, 2, ask=stop_of(1, 5))
    watched.run(cut, 2)
    assert [back.step for back in watched.kind(Resumed)] == [5]
    assert [one.step for one in watched.kind(Saved)] == [2, 4, 5, 6]
    assert losses(cut) == losses(whole)
    assert digest(cut, 6) == digest(whole, 6)


# --- another number of ranks -----------------------------------------------------------------


@pytest.mark.prove
def test_other_worlds_and_strategies_see_the_same_rows_and_losses(
    tmp_path: Path, watched: Watched
) -> None:
    whole = recipe_in(tmp_path / "whole", "run.steps=5", "optimizer.lr=3e-3", "batch.micro=1")
    watched.run(whole, 4)
    rows = watched.rows(5)
    watched.trained.clear()
    legs = ((4, "full_shard"), (2, "zero1"), (3, "shard_grad_op"), (1, "full_shard"))
    for leg, (world, strategy) in enumerate((*legs, (4, "no_shard"))):
        cut = recipe_in(
            tmp_path / "cut",
            "run.steps=5",
            "optimizer.lr=3e-3",
            f"sharding.strategy={strategy}",
            f"batch.micro={1 + (world < 4)}",
        )
        watched.run(cut, world, ask=stop_of(0, leg + 1))
    assert [back.ranks for back in watched.kind(Resumed)] == [4, 2, 3, 1]
    assert [s["step"] for s in lines(cut) if s["record"] == "stepped"] == list(range(1, 6))
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)
    assert watched.rows(5) == rows


# --- text that is read while the model trains ---------------------------------------------------

STREAMED = (
    *("data.max_bytes=4000", "data.streaming.streams=6", "data.streaming.shuffle=5"),
    *("run.eval_rows=4", "batch.micro=1"),
)


@pytest.mark.parametrize("again", [pytest.param(2, marks=pytest.mark.prove), 3])
def test_streamed_text_is_continued_at_the_same_sample_on_every_number_of_ranks(
    again: int, tmp_path: Path, watched: Watched
) -> None:
    whole = recipe_in(tmp_path / "whole", *STREAMED)
    watched.run(whole, 2)
    rows = watched.rows(6)
    assert len({tuple(row) for row in rows}) > 60
    watched.trained.clear()
    watched.records.clear()
    cut = recipe_in(tmp_path / "cut", *STREAMED)
    watched.run(cut, 2, ask=stop_of(1, 3))
    watched.run(cut, again)
    assert [(back.step, back.sample) for back in watched.kind(Resumed)] == [(3, 36)]
    assert watched.rows(6) == rows
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)
    if again == 2:
        assert losses(cut) == losses(whole)
        assert digest(cut, 6) == digest(whole, 6)


@pytest.mark.prove
def test_a_run_ends_on_all_ranks_before_the_step_that_one_stream_cannot_fill(
    tmp_path: Path, watched: Watched
) -> None:
    recipe = recipe_in(tmp_path, *STREAMED, "data.streaming.epochs=1", "run.steps=500")
    outcome = watched.run(recipe, 3)
    assert not outcome.stopped
    assert outcome.evaluated is not None
    last = outcome.step
    assert 1 < last < 500
    assert steps(watched.records)[-1] == outcome.evaluated.step == last
    assert f"step-{last}" in saved(recipe)
    (warned,) = watched.kind(Warned)
    assert warned.message.startswith(f"the text ended after step {last} of 500: a stream has too")
    assert watched.run(recipe, 2).step == last  # the same command again: nothing is left to do
    assert watched.run(recipe_in(tmp_path, *STREAMED, f"run.steps={last + 2}"), 3).step == last + 2


def test_streamed_text_that_has_changed_is_another_run(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, *STREAMED)
    watched.run(recipe, 2, ask=stop_of(0, 1))
    (tmp_path / "text" / "000.txt").write_text("other text", "utf-8")
    with pytest.raises(ConfigError, match=r"what data\.source .* holds has changed since"):
        watched.run(recipe, 1)
    with pytest.raises(ConfigError, match=r"less text than one step takes: 6000 rows"):
        watched.run(
            recipe_in(tmp_path / "less", *STREAMED, "data.streaming.epochs=1", "batch.rows=6000"), 1
        )


# --- what is recorded ------------------------------------------------------------------------


def test_metrics_and_picture_are_those_of_one_run(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, "run.eval_every=2")
    watched.killed(recipe, 2, at=(6, 1, 1))
    assert [s["step"] for s in lines(recipe) if s["record"] == "stepped"] == [1, 2, 3, 4, 5]
    watched.run(recipe, 2)
    stored = [(s["record"], s["step"]) for s in lines(recipe) if s.get("step")]
    assert [step for kind, step in stored if kind == "stepped"] == [1, 2, 3, 4, 5, 6]
    assert [step for kind, step in stored if kind == "evaluated"] == [2, 4, 6]
    assert [step for kind, step in stored if kind == "saved"] == [2, 4, 6]
    assert watched.drawn == [1, 2, 3, 4, 5, 6]


def test_a_validation_that_a_stop_left_out_is_made_when_the_run_goes_on(
    tmp_path: Path, watched: Watched
) -> None:
    recipe = recipe_in(tmp_path, "run.eval_every=2", "checkpoint.keep_best=true")
    watched.run(recipe, 2, ask=stop_of(1, 2))
    assert watched.kind(Evaluated) == []
    watched.run(recipe, 2)
    assert [evaluated.step for evaluated in watched.kind(Evaluated)] == [2, 4, 6]
    order = [
        type(r) for r in watched.records if isinstance(r, Resumed | Evaluated | Stepped | Saved)
    ]
    after = order.index(Resumed)
    assert order[after : after + 4] == [Resumed, Evaluated, Saved, Stepped]


@pytest.mark.prove
def test_killed_before_the_first_save_it_begins_again(tmp_path: Path, watched: Watched) -> None:
    whole, cut = recipe_in(tmp_path / "whole"), recipe_in(tmp_path / "cut")
    watched.run(whole, 2)
    watched.killed(cut, 2, at=(2, 1, 3))
    watched.records.clear()
    watched.run(cut, 2)
    assert watched.kind(Resumed) == []
    assert losses(cut) == losses(whole)


def test_killed_after_the_last_save_it_has_only_to_finish(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path)

    def dies(*_: object) -> None:
        raise KeyError

    with watched.monkeypatch.context() as patch:
        patch.setattr("shardwise.api.sharded.Sharded.save_file", dies)
        with pytest.raises(KeyError):
            watched.run(recipe, 2)
    watched.records.clear()
    outcome = watched.run(recipe, 2)
    assert steps(watched.records) == []
    assert (outcome.step, outcome.evaluated) == (6, None)
    assert (Path(recipe.run.folder) / "model.safetensors").is_file()
    assert lines(recipe)[-1]["record"] == "finished"
