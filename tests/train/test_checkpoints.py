"""What a run saves, keeps and refuses. That it goes on exactly is in ``test_resume``."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.checkpoint import disk, failpoints
from shardwise.convert.catalogue import Catalogue
from shardwise.errors import CheckpointError, ConfigError
from shardwise.recipe.recipe import CheckpointConfig, Recipe
from shardwise.train.checkpoints import is_due
from shardwise.train.records import (
    Complete,
    Evaluated,
    Record,
    Replaced,
    Resumed,
    Saved,
    Stepped,
    Warned,
)
from shardwise.train.requests import SignalRequests
from tests.train.runs import Watched, checkpoint, digest, losses, saved, steps
from tests.train.tiny import documents, tiny_recipe

SHORT = (
    "run.steps=6",
    "run.eval_every=0",
    "sample.tokens=0",
    "checkpoint.save_every=2",
    "batch.micro=6",
    "model.layers=1",
)


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return tiny_recipe(folder, *SHORT, *overrides)


def when(step: int, act: Callable[[], object]) -> Callable[[Record], None]:
    """Do ``act`` as soon as ``step`` is told."""

    def hear(record: Record) -> None:
        if isinstance(record, Stepped) and record.step == step:
            act()

    return hear


@contextmanager
def failing(point: str, times: int = 1) -> Iterator[None]:
    """Saving fails at this point, so many times."""
    failures = [times]

    def fail(reached: str, rank: int) -> None:
        if reached == point and rank == 0 and failures[0]:
            failures[0] -= 1
            raise CheckpointError("the disk is full")

    failpoints.listeners.append(fail)
    try:
        yield
    finally:
        failpoints.listeners.remove(fail)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


# --- when ------------------------------------------------------------------------------------


def test_what_is_due_unasked() -> None:
    def due(best: bool = False, **config: object) -> list[int]:
        checkpoint_config = CheckpointConfig.model_validate(config)
        return [step for step in range(1, 8) if is_due(checkpoint_config, step, 7, best)]

    assert due(save_every=3) == [3, 6, 7]
    assert due(save_every=0) == []
    assert due(save_every=0, best=True) == []
    assert due(save_every=0, keep_best=True, best=True) == [1, 2, 3, 4, 5, 6, 7]
    assert due(save_every=3, keep_best=True) == [3, 6, 7]


def test_two_equal_runs_have_equal_checkpoints(tmp_path: Path, watched: Watched) -> None:
    """Wherever they lie, and whatever the process had drawn before."""
    for name in ("a", "b"):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        watched.run(recipe_in(tmp_path, f"run.folder={tmp_path / name}", "run.steps=3"), 1)
    places = [tmp_path / name / "checkpoints" / "step-3" for name in ("a", "b")]
    one, other = map(Catalogue.read, places)
    assert one.training == other.training
    first, second = (
        {file.name: file.digest for file in each.files if file.name.endswith(".safetensors")}
        for each in (one, other)
    )
    assert first == second


def test_only_the_newest_stay(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, "checkpoint.save_total_limit=1")
    watched.run(recipe, 2)
    assert saved(recipe) == ["step-6"]
    assert [(s.step, s.removed) for s in watched.kind(Saved)] == [
        (2, ()),
        (4, ("step-2",)),
        (6, ("step-4",)),
    ]
    every = recipe_in(tmp_path / "all", "checkpoint.save_total_limit=null")
    watched.run(every, 1)
    assert saved(every) == ["step-2", "step-4", "step-6"]


def test_the_best_stays_however_old(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(
        tmp_path,
        "run.eval_every=1",
        "checkpoint.save_every=0",
        "checkpoint.keep_best=true",
        "checkpoint.save_total_limit=1",
        "optimizer.lr=3",  # so that the loss rises again
        "optimizer.warmup=4",
    )
    watched.run(recipe, 2)
    by_step = {e.step: e.loss for e in watched.kind(Evaluated)}
    best = min(by_step, key=lambda step: by_step[step])
    assert best < 6
    assert saved(recipe) == [f"step-{best}"]
    record = json.loads((checkpoint(recipe, best) / "manifest.json").read_text())
    assert record["metric"] == by_step[best]


def test_the_best_so_far_is_remembered_when_the_run_goes_on(
    tmp_path: Path, watched: Watched
) -> None:
    changes = ("run.eval_every=1", "checkpoint.keep_best=true", "checkpoint.save_every=0")
    recipe = recipe_in(tmp_path, *changes, "optimizer.lr=3", "optimizer.warmup=4")
    watched.run(recipe, 2)
    expected = [s.step for s in watched.kind(Saved)]
    watched.records.clear()
    cut = recipe_in(tmp_path / "cut", *changes, "optimizer.lr=3", "optimizer.warmup=4")
    stop = SignalRequests()
    watched.run(cut, 2, when(4, stop.stop), lambda c: stop if c.rank == 0 else SignalRequests())
    watched.run(cut, 2)
    steps = [s.step for s in watched.kind(Saved) if s.step != 5]
    assert steps == [step for step in expected if step != 5]


def test_losses_of_other_rows_are_not_compared_with_those_of_before(
    tmp_path: Path, watched: Watched
) -> None:
    watched.run(recipe_in(tmp_path, "run.steps=2", "run.eval_every=1"), 1)
    more = ("run.steps=3", "run.eval_every=1", "run.eval_rows=3")
    with pytest.raises(ConfigError, match=r"run\.eval_rows was 7 and is 3.* run\.eval_rows: 7"):
        watched.run(recipe_in(tmp_path, *more, "checkpoint.keep_best=true"), 1)
    watched.run(recipe_in(tmp_path, *more), 1)  # nothing is chosen by them


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path, watched: Watched) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = recipe_in(tmp_path)
    watched.run(recipe, 2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(recipe, 6))
    final = AutoModelForCausalLM.from_pretrained(recipe.run.folder)
    for name, value in model.state_dict().items():
        assert value.equal(final.state_dict()[name])
    text = "def value(self): return x\n"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(recipe, 6))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# --- on request ------------------------------------------------------------------------------


def test_a_file_asks_all_ranks_to_save_and_stop(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, "checkpoint.save_every=0", "batch.micro=2")
    asks = Path(recipe.run.folder) / "stop"
    outcome = watched.run(recipe, 3, when(2, asks.touch))
    assert (outcome.step, outcome.stopped) == (3, True)
    assert saved(recipe) == ["step-3"]
    assert not asks.exists()
    assert steps(watched.records) == [1, 2, 3]


def test_a_rank_of_which_nobody_thinks_can_ask_too(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, "checkpoint.save_every=0", "batch.micro=2")
    requests = SignalRequests()
    watched.run(
        recipe, 3, when(4, requests.save), lambda c: requests if c.rank == 2 else SignalRequests()
    )
    assert saved(recipe) in (["step-4"], ["step-5"])


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_does_not_end_the_run(
    tmp_path: Path, watched: Watched, background: bool
) -> None:
    recipe = recipe_in(tmp_path, f"checkpoint.asynchronous={background}")
    with failing("half of the data written"):
        outcome = watched.run(recipe, 2)
    assert (outcome.step, outcome.save_error) == (6, "")
    (warning,) = watched.kind(Warned)
    assert warning.message.startswith("NOT SAVED, and the run goes on: ")
    assert "the disk is full" in warning.message
    assert saved(recipe) == ["step-4", "step-6"]
    whole = recipe_in(tmp_path / "whole")
    watched.run(whole, 2)
    assert losses(recipe) == losses(whole)
    assert digest(recipe, 6) == digest(whole, 6)


@pytest.mark.parametrize("background", [False, True])
def test_a_last_save_that_fails_is_the_run_s_trouble(
    tmp_path: Path, watched: Watched, background: bool
) -> None:
    recipe = recipe_in(tmp_path, "checkpoint.save_every=6", f"checkpoint.asynchronous={background}")
    with failing("data written"):
        outcome = watched.run(recipe, 2)
    assert "the disk is full" in outcome.save_error
    assert saved(recipe) == []
    assert (Path(recipe.run.folder) / "model.safetensors").is_file()


def test_a_model_that_cannot_be_written_is_told_with_what_was_saved(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recipe = recipe_in(tmp_path)
    with monkeypatch.context() as patch, failing("data written", times=9):
        patch.setattr("shardwise.checkpoint.one_file.allocate", full)
        with pytest.raises(CheckpointError) as caught:
            watched.run(recipe, 1)
    text = str(caught.value)
    place = f"{recipe.run.folder}/model.safetensors"
    assert "has taken all its 6 steps, and the model could not be written: " in text
    assert "No space left on device" in text
    assert "Its last checkpoint could not be saved either: " in text
    watched.run(recipe, 1)
    assert Path(place).is_file()


def test_what_is_broken_is_skipped_loudly_and_makes_room(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path)
    watched.killed(recipe, 2, at=(5, 0, 1))
    weights = checkpoint(recipe, 4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    watched.records.clear()
    watched.run(recipe, 2)
    skipped, moved = watched.kind(Warned)
    assert skipped.message.startswith(f"SKIPPED {checkpoint(recipe, 4)}")
    assert moved.message == "damaged step-4 renamed to broken-step-4-1"
    (back,) = watched.kind(Resumed)
    assert back.step == 2
    assert saved(recipe) == ["broken-step-4-1", "step-2", "step-6"]  # what it went on from stays


def test_other_tokens_are_refused_and_the_same_elsewhere_are_not(
    tmp_path: Path, watched: Watched
) -> None:
    recipe = recipe_in(tmp_path)
    watched.killed(recipe, 2, at=(3, 0, 1))
    (tmp_path / "text").rename(tmp_path / "moved")
    moved = f"data.source={tmp_path / 'moved'}"
    (tmp_path / "moved" / "new.txt").write_text(documents(70)[-1], "utf-8")
    with pytest.raises(ConfigError, match=r"was trained on other text: data\.source was .* now\."):
        watched.run(tiny_recipe(tmp_path, *SHORT, moved), 1)
    (tmp_path / "moved" / "new.txt").unlink()
    assert watched.run(tiny_recipe(tmp_path, *SHORT, moved), 2).step == 6


def files(recipe: Recipe) -> dict[Path, bytes]:
    folder = Path(recipe.run.folder)
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("vocabulary", [300, 2000])
def test_a_refused_start_changes_nothing_of_a_finished_model(
    tmp_path: Path, watched: Watched, vocabulary: int
) -> None:
    """With 2,000 there are fewer tokens than that to learn, and how many depends on the text."""
    recipe = recipe_in(tmp_path, f"tokenizer.vocabulary={vocabulary}")
    watched.run(recipe, 1)
    before = files(recipe)
    more = recipe_in(tmp_path, f"tokenizer.vocabulary={vocabulary}", "run.steps=8")
    (tmp_path / "text" / "new.txt").write_text("class Other:\n    pass\n" * 40, "utf-8")
    with pytest.raises(ConfigError, match=r"has changed since, [\d,]+ tokens then and [\d,]+ now"):
        watched.run(more, 1)
    assert files(recipe) == before


@pytest.mark.parametrize(
    "mistake", ["data.source=/nowhere", "data.context=5000", "sharding.wrap=No"]
)
def test_what_would_be_overwritten_stays_where_the_start_fails(
    tmp_path: Path, watched: Watched, mistake: str
) -> None:
    recipe = recipe_in(tmp_path, "run.steps=3")
    watched.run(recipe, 1)
    before = files(recipe)
    with pytest.raises(ConfigError):
        watched.run(recipe_in(tmp_path, "run.steps=3", "run.overwrite=true", mistake), 1)
    assert files(recipe) == before


def test_an_interrupted_run_that_says_overwrite_goes_on_and_a_finished_one_begins_anew(
    tmp_path: Path, watched: Watched
) -> None:
    recipe = recipe_in(tmp_path, "run.overwrite=true")
    watched.killed(recipe, 2, at=(5, 0, 1))
    watched.run(recipe, 2)
    assert [back.step for back in watched.kind(Resumed)] == [4]
    watched.records.clear()
    watched.run(recipe, 2)
    assert steps(watched.records) == [1, 2, 3, 4, 5, 6]
    assert watched.kind(Replaced) == [Replaced(recipe.run.folder, 6)]
    assert not list(Path(recipe.run.folder).glob("replaced-*"))


# --- more than to go on ----------------------------------------------------------------------


def test_a_finished_run_says_so_and_trains_no_more(tmp_path: Path, watched: Watched) -> None:
    recipe = recipe_in(tmp_path, "batch.micro=2")
    watched.run(recipe, 2)
    before = {path: path.stat().st_mtime_ns for path in Path(recipe.run.folder).rglob("*")}
    watched.records.clear()
    assert watched.run(recipe, 3).step == 6
    assert watched.records == [Complete(recipe.run.folder, 6)]
    after = {path: path.stat().st_mtime_ns for path in Path(recipe.run.folder).rglob("*")}
    assert after == before


def test_a_finished_run_goes_on_to_more_steps(tmp_path: Path, watched: Watched) -> None:
    watched.run(recipe_in(tmp_path), 2)
    more = recipe_in(tmp_path, "run.steps=8")
    watched.records.clear()
    assert watched.run(more, 2).step == 8
    assert steps(watched.records) == [7, 8]
    assert watched.drawn == [1, 2, 3, 4, 5, 6, 7, 8]


def test_another_run_or_one_of_its_checkpoints_can_be_where_a_run_begins(
    tmp_path: Path, watched: Watched
) -> None:
    first = recipe_in(tmp_path)
    watched.run(first, 2)
    expected, folder = digest(first, 6), Path(first.run.folder)
    for place in (checkpoint(first, 4), folder / "checkpoints", folder):
        newer = 4 if place.name == "step-4" else 6
        watched.records.clear()
        new = recipe_in(tmp_path, f"run.folder={tmp_path / 'new'}", f"checkpoint.resume={place}")
        watched.run(
            new.model_copy(update={"run": new.run.model_copy(update={"overwrite": True})}), 2
        )
        assert watched.kind(Resumed)[0].step == newer
        if newer == 4:
            assert digest(new, 6) == expected


def test_what_is_no_checkpoint_of_the_trainer_is_refused(tmp_path: Path, watched: Watched) -> None:
    first = recipe_in(tmp_path)
    watched.run(first, 1)
    new = recipe_in(
        tmp_path,
        f"run.folder={tmp_path / 'new'}",
        f"checkpoint.resume={Path(first.run.folder) / 'model.safetensors'}",
    )
    with pytest.raises((ConfigError, CheckpointError), match="it has no step of a run"):
        watched.run(new, 1)
    (Path(first.run.folder) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"`shardwise train`: nothing is there\."):
        watched.run(new, 1)


def test_what_cannot_be_read_is_not_taken_for_a_checkpoint_of_no_run(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "NAPS", ())
    first = recipe_in(tmp_path)
    watched.run(first, 1)
    place = checkpoint(first, 6)
    document = place / "training.json"
    new = recipe_in(tmp_path, f"run.folder={tmp_path / 'new'}", f"checkpoint.resume={place}")
    document.write_text("{")
    with pytest.raises(CheckpointError, match=r"training\.json is damaged"):
        watched.run(new, 1)
    document.unlink()
    document.mkdir()
    with pytest.raises(CheckpointError, match=r"training\.json failed: Is a directory"):
        watched.run(new, 1)


def test_what_a_killed_attempt_has_left_goes_when_the_run_ends(
    tmp_path: Path, watched: Watched
) -> None:
    """Of the model, and of a checkpoint, which no later save removes."""
    recipe = recipe_in(tmp_path, "run.steps=2")
    watched.run(recipe, world=2)
    run = Path(recipe.run.folder)
    (run / "metrics.jsonl").write_text("", "utf-8")  # it had not finished
    leftovers = [run / ".model.safetensors.unfinished-0123456789abcdef"]
    leftovers += [run / "checkpoints" / "step-1.removing-0123456789abcdef"]
    for folder in leftovers:
        folder.mkdir()
    assert watched.run(recipe, world=2).step == 2
    assert not any(folder.exists() for folder in leftovers)
