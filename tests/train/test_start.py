from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.read import to_yaml
from shardwise.recipe.recipe import Recipe
from shardwise.train.folder import RECIPE
from shardwise.train.start import Start, decide_start, differences
from tests.train.tiny import tiny_recipe


def earlier(
    recipe: Recipe, *, finished: int | None = None, saved: int | None = None, planned: int = 4
) -> Path:
    """A folder as a run of ``recipe`` leaves it."""
    folder = Path(recipe.run.folder)
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(to_yaml(recipe), "utf-8")
    last = f'{{"record": "finished", "steps": {finished}}}' if finished else '{"record": "x"}'
    (folder / "metrics.jsonl").write_text(
        f'{{"record": "prepared"}}\n{{"record": "built", "steps": {planned}}}\n{last}\n', "utf-8"
    )
    if saved is not None:
        (folder / "checkpoints" / f"step-{saved}").mkdir(parents=True)
    return folder


def test_where_there_is_nothing_it_begins_afresh_and_nothing_is_written(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    assert decide_start(recipe) is Start.NEW
    assert not Path(recipe.run.folder).exists()


def test_hidden_files_are_nothing(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    Path(recipe.run.folder).mkdir()
    (Path(recipe.run.folder) / ".recipe.123.yaml").touch()
    assert decide_start(recipe) is Start.NEW


def test_what_was_stopped_or_killed_goes_on_whether_it_had_saved_or_not(tmp_path: Path) -> None:
    for name, saved in (("a", 2), ("b", None)):
        recipe = tiny_recipe(tmp_path / name)
        earlier(recipe, saved=saved)
        assert decide_start(recipe) is Start.RESUME


def test_what_was_interrupted_goes_on_by_the_same_command_also_where_it_says_overwrite(
    tmp_path: Path,
) -> None:
    recipe = tiny_recipe(tmp_path, "run.overwrite=true")
    earlier(recipe, saved=2)
    assert decide_start(recipe) is Start.RESUME
    assert decide_start(tiny_recipe(tmp_path, "run.overwrite=true", "run.seed=1")) is Start.NEW
    anew = ("run.overwrite=true", "checkpoint.resume=never")
    assert decide_start(tiny_recipe(tmp_path, *anew)) is Start.NEW
    assert decide_start(tiny_recipe(tmp_path, *anew), restarted=True) is Start.RESUME


def test_a_run_of_which_nothing_says_what_it_is_may_be_overwritten(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "run.overwrite=true")
    (earlier(recipe) / RECIPE).write_text("a: [", "utf-8")
    assert decide_start(recipe) is Start.NEW


def test_what_is_finished_is_finished(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    earlier(recipe, finished=4)
    assert decide_start(recipe) is Start.FINISHED
    assert decide_start(tiny_recipe(tmp_path, "run.overwrite=true")) is Start.NEW


def test_what_is_finished_goes_on_to_more_steps_from_a_checkpoint_only(tmp_path: Path) -> None:
    earlier(tiny_recipe(tmp_path / "a"), finished=4, saved=4)
    assert decide_start(tiny_recipe(tmp_path / "a", "run.steps=6")) is Start.RESUME
    earlier(tiny_recipe(tmp_path / "b"), finished=4)
    with pytest.raises(ConfigError, match=r"finished with 4 steps and has no checkpoint"):
        decide_start(tiny_recipe(tmp_path / "b", "run.steps=6"))


@pytest.mark.parametrize(
    ("finished", "changes", "start"),
    [
        (4, [], Start.FINISHED),  # patience ended it
        (4, ["run.patience=null"], Start.RESUME),
        (4, ["run.patience=3"], Start.RESUME),
        (4, ["run.epochs=2"], Start.FINISHED),
        (4, ["run.epochs=3"], Start.RESUME),
        (12, ["run.patience=null"], Start.FINISHED),
        (12, ["run.epochs=5.5"], Start.FINISHED),
        (12, ["run.epochs=6.5"], Start.RESUME),
    ],
)
def test_a_run_in_epochs_is_finished_if_it_has_taken_their_steps(
    tmp_path: Path, finished: int, changes: list[str], start: Start
) -> None:
    given = ("run.epochs=6", "run.eval_every=epoch", "run.patience=1")
    earlier(tiny_recipe(tmp_path, *given), finished=finished, saved=finished, planned=12)
    assert decide_start(tiny_recipe(tmp_path, *given, *changes)) is start


@pytest.mark.parametrize(
    "override",
    [
        "model.width=32",
        "tokenizer.vocabulary=310",
        "data.context=8",
        "batch.rows=24",
        "optimizer.betas=[0.5, 0.9]",
        "run.seed=1",
        "sharding.precision.stored_dtype=float64",
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(tmp_path: Path, override: str) -> None:
    earlier(tiny_recipe(tmp_path))
    name = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"cannot resume: {name} was .* --run\.overwrite"):
        decide_start(tiny_recipe(tmp_path, override))


@pytest.mark.parametrize(
    "override",
    [
        "batch.micro=3",
        "sharding.strategy=zero1",
        "sharding.wrap=none",
        "sharding.precision=bf16",
        "run.steps=9",
        "run.eval_every=3",
        "run.log_every=1",
        "checkpoint.save_every=1",
        "sample.tokens=0",
        "data.source=/moved",
    ],
)
def test_how_it_is_computed_shown_and_saved_may_change(tmp_path: Path, override: str) -> None:
    earlier(tiny_recipe(tmp_path))
    assert decide_start(tiny_recipe(tmp_path, override)) is Start.RESUME


def test_a_key_that_an_earlier_version_did_not_know_had_its_default(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    before = recipe.model_dump(mode="json")
    del before["optimizer"]["clip"]
    assert differences(before, recipe) == []
    other = tiny_recipe(tmp_path, "optimizer.clip=2")
    assert differences(before, other) == ["optimizer.clip was 1.0 and is 2.0"]


def test_the_stored_dtype_of_a_run_of_0_1_is_read_under_its_earlier_name(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "sharding.precision.stored_dtype=float64")
    before = recipe.model_dump(mode="json")
    dtypes = before["sharding"]["precision"]
    dtypes["stored"] = dtypes.pop("stored_dtype")
    assert differences(before, recipe) == []


def test_an_earlier_run_is_left_alone_where_nothing_may_be_resumed(tmp_path: Path) -> None:
    earlier(tiny_recipe(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is never; .* --run\.overwrite true"):
        decide_start(tiny_recipe(tmp_path, "checkpoint.resume=never"))


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    recipe = tiny_recipe(tmp_path)
    (earlier(recipe) / RECIPE).write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read as a recipe"):
        decide_start(recipe)


def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "run.overwrite=true")
    Path(recipe.run.folder).mkdir()
    (Path(recipe.run.folder) / "config.json").touch()
    with pytest.raises(ConfigError, match=r"holds config\.json and no recipe\.yaml"):
        decide_start(recipe)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "run.overwrite=true")
    Path(recipe.run.folder).touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        decide_start(recipe)


def test_to_go_back_within_a_run_is_refused(tmp_path: Path) -> None:
    folder = earlier(tiny_recipe(tmp_path), saved=2)
    again = tiny_recipe(tmp_path, f"checkpoint.resume={folder / 'checkpoints' / 'step-2'}")
    with pytest.raises(ConfigError, match=r"lies in run\.folder"):
        decide_start(again)
    with pytest.raises(ConfigError, match=r"lies in run\.folder"):  # it would be moved away
        decide_start(
            again.model_copy(update={"run": again.run.model_copy(update={"overwrite": True})})
        )


def test_checkpoints_that_were_fetched_begin_a_run_that_may_resume_from_them(
    tmp_path: Path,
) -> None:
    """Others would be taken for those of the run that begins beside them."""
    mirror = "checkpoint.mirror=memory://run"
    recipe = tiny_recipe(tmp_path, mirror)
    (Path(recipe.run.folder) / "checkpoints" / "step-4").mkdir(parents=True)
    assert decide_start(recipe) is Start.NEW
    with pytest.raises(ConfigError, match="it is not an earlier run"):
        decide_start(tiny_recipe(tmp_path, mirror, "checkpoint.resume=never"))
