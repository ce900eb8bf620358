from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train.disk_estimate import advice, most_at_once
from tests.train.runs import Watched, checkpoint
from tests.train.tiny import tiny_recipe


@pytest.mark.parametrize(
    ("checkpoints", "number"),
    [
        ({"save_every": 10, "save_total_limit": 2}, 3),
        ({"save_every": 10, "save_total_limit": 2, "keep_best": True}, 4),
        ({"save_every": 10, "save_total_limit": None}, 10),
        ({"save_every": 40, "save_total_limit": None}, 3),
        ({"save_every": 100, "save_total_limit": 2}, 1),
        ({"save_every": 0}, 1),
    ],
)
def test_a_checkpoint_is_written_before_the_oldest_is_removed(
    checkpoints: dict[str, object], number: int
) -> None:
    run = {"steps": 100, "eval_every": 10}
    assert most_at_once(Recipe.model_validate({"run": run, "checkpoint": checkpoints})) == number


@pytest.mark.parametrize(
    ("checkpoints", "number", "text"),
    [
        ({"save_every": 10}, 3, "Lower checkpoint.save_total_limit, raise checkpoint"),
        ({"save_every": 10, "save_total_limit": 1}, 2, "Raise checkpoint.save_every or name a"),
        ({"save_every": 10}, 1, "Name a folder on another disk."),
    ],
)
def test_a_refusal_advises_what_helps(
    checkpoints: dict[str, object], number: int, text: str
) -> None:
    assert advice(Recipe.model_validate({"checkpoint": checkpoints}), number).startswith(text)


def test_a_run_that_does_not_fit_on_the_disk_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, recipe = Watched(monkeypatch), tiny_recipe(tmp_path, "checkpoint.save_every=2")
    watched.run(recipe, 1)
    stored = sum(f.stat().st_size for f in checkpoint(recipe, 4).rglob("*.safetensors"))
    model = (tmp_path / "run" / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "run")

    def run(free: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        watched.run(recipe, 2)

    with pytest.raises(ConfigError, match=r"of free disk, and .* needs .*: 2 more ch"):
        run(0.7 * (2 * stored + model))  # files this small are a fifth headers
    assert not (tmp_path / "run" / "recipe.yaml").exists()
    run(2 * stored + model)
