"""A run's `step.json`: the events of one step with the bytes of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.recipe.recipe import Recipe
from shardwise.train.folder import STEP, Folder
from shardwise.train.records import Warned
from tests.train.runs import Watched, lines
from tests.train.tiny import tiny_recipe

SMALL = ("sample.tokens=0", "batch.micro=6", "run.eval_rows=2")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def recorded_step(recipe: Recipe) -> Any:
    return json.loads((Path(recipe.run.folder) / STEP).read_text("utf-8"))


@pytest.mark.parametrize(("warmup", "world"), [(0, 1), (2, 2)])
def test_the_last_step_before_tokens_per_second_counts_is_recorded_but_not_the_first(
    watched: Watched, tmp_path: Path, warmup: int, world: int
) -> None:
    recipe = tiny_recipe(tmp_path, *SMALL, f"run.throughput_warmup={warmup}")
    watched.run(recipe, world=world)
    assert recorded_step(recipe)["step"] == 2


def test_a_run_without_such_a_step_has_none(watched: Watched, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *SMALL, "run.throughput_warmup=9")
    watched.run(recipe, world=1)
    assert not (Path(recipe.run.folder) / STEP).exists()


def test_each_moment_has_the_bytes_that_exist_then(watched: Watched, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *SMALL)  # each block is a unit: tests/conftest.py
    watched.run(recipe, world=2)
    step = recorded_step(recipe)
    units = {unit["name"]: unit for unit in lines(recipe)[1]["units"]}
    assert [moment[2] for moment in (step["moments"][0], step["moments"][-1])] == [None, None]
    times = [seconds for seconds, _, _ in step["moments"]]
    assert times == sorted(times)
    full = 0
    for _, nbytes, event in step["moments"]:
        of_kind = dict(zip(step["kinds"], nbytes, strict=True))
        if event and event[0] in ("gather", "free"):
            full += units[event[1]]["gathered"] * (1 if event[0] == "gather" else -1)
        assert of_kind["gathered"] == full
        assert of_kind["parameters"] == sum(unit["shard"] for unit in units.values())
    assert of_kind["gradients"] == of_kind["parameters"]
    assert of_kind["gradient buckets"] == 0


def test_a_file_that_cannot_be_written_is_a_warning(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Folder.write_text

    def full(folder: Folder, name: str, text: str) -> None:
        if name == STEP:
            raise OSError(28, "No space left on device")
        write(folder, name, text)

    monkeypatch.setattr(Folder, "write_text", full)
    watched.run(tiny_recipe(tmp_path, *SMALL), world=1)
    (warning,) = watched.kind(Warned)
    assert warning.message.endswith("is not written: No space left on device")
