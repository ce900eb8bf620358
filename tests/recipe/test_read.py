from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.read import flatten, read_recipe, to_yaml
from shardwise.recipe.recipe import Recipe, keys
from shardwise.train.batches import accumulation


def written(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recipe(path, overrides)
    return str(caught.value)


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, "")) == Recipe()


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml = written(tmp_path, "optimizer:\n  lr: 1e-4\nrun: {steps: 30}\n")
    toml = written(tmp_path, "[optimizer]\nlr = 1e-4\n[run]\nsteps = 30\n", "r.toml")
    assert read_recipe(yaml) == read_recipe(toml)
    assert read_recipe(yaml).optimizer.lr == 1e-4


def test_an_unknown_key_names_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = written(tmp_path, "model:\n  width: 64\n  hedas: 4\n")
    expected = f"{path}:3: model.hedas: there is no such key; did you mean model.heads?"
    assert message(path) == expected


def test_an_unknown_section_names_the_nearest_section(tmp_path: Path) -> None:
    assert "optimiser: there is no such key; did you mean optimizer?" in message(
        written(tmp_path, "optimiser: {lr: 1}\n")
    )


def test_a_key_in_the_wrong_section_is_found_where_it_belongs(tmp_path: Path) -> None:
    assert message(written(tmp_path, "lr: 1\n")).endswith("did you mean optimizer.lr?")


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {width: abc}\nrun:\n  steps: -1\n")
    lines = message(path).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:1", f"{path}:3"]
    assert "model.width is 'abc'" in lines[0]
    assert "run.steps is -1" in lines[1]


def test_a_mistake_inside_a_nested_table_has_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "sharding:\n  prefetch:\n    when: later\n")
    assert message(path).startswith(f"{path}:3: sharding.prefetch.when is 'later'")


def test_two_values_that_do_not_fit_name_their_section(tmp_path: Path) -> None:
    path = written(tmp_path, "model:\n  heads: 4\n  kv_heads: 3\n")
    assert message(path).startswith(f"{path}:1: model: 4 heads cannot share 3 kv_heads")


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "run: {seed: 1}\noptimizer:\n  lr: 1\n  lr: 2\n")
    assert message(path) == (
        f"{path}:4: optimizer.lr is written twice, first in line 3; remove one of them."
    )


@pytest.mark.parametrize(
    ("text", "name", "text_of_error"),
    [
        ("a: [", "r.yaml", "r.yaml:1: this is not valid YAML: after 'a: [' a value, a bracket"),
        (
            "run:\n\tsteps: 3",
            "r.yaml",
            "r.yaml:2: this is not valid YAML: the line is indented with",
        ),
        ("run:\n  a: b: c", "r.yaml", "r.yaml:2: this is not valid YAML: 'a: b: c' cannot be read"),
        ("a: \x01", "r.yaml", "it holds control characters"),
        ("a: &a {b: *a}", "r.yaml", "nested too deeply"),
        ("- 1\n", "r.yaml", "must be a table of sections"),
        ("= 3", "r.toml", "r.toml:1: this is not valid TOML: '= 3' cannot be read at column 1"),
        ("[run]\nsteps =", "r.toml", "after 'steps =' a value, a bracket or a quote is missing"),
        ("{}", "r.json", "expected a .yaml, .yml or .toml file"),
    ],
)
def test_a_file_that_is_no_recipe_says_so(
    tmp_path: Path, text: str, name: str, text_of_error: str
) -> None:
    assert text_of_error in message(written(tmp_path, text, name))


def test_a_missing_recipe_names_those_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "", "demo.yaml")
    assert message(tmp_path / "dmeo.yaml").endswith("does not exist. There are: demo.yaml.")


@pytest.mark.parametrize(
    "words", [["--optimizer.lr", "3e-4"], ["--optimizer.lr=3e-4"], ["optimizer.lr=3e-4"]]
)
def test_an_override_may_be_written_in_three_ways(tmp_path: Path, words: list[str]) -> None:
    path = written(tmp_path, "optimizer: {lr: 1}\n")
    assert read_recipe(path, words).optimizer.lr == 3e-4


def test_overrides_hold_lists_null_and_negative_looking_text(tmp_path: Path) -> None:
    recipe = read_recipe(
        written(tmp_path, "sharding: {prefetch: {limit: 2}}"),
        ["--optimizer.betas", "[0.8, 0.9]", "sharding.prefetch.limit=null", "sample.prompt=-1 = "],
    )
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.sharding.prefetch.limit is None
    assert recipe.sample.prompt == "-1 = "


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, ""), ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_unknown_override_names_the_nearest_key(tmp_path: Path) -> None:
    text = message(written(tmp_path, ""), "--optimiser.lr", "3")
    assert text == "override --optimiser.lr: there is no such key; did you mean optimizer.lr?"


def test_an_override_without_a_value_says_how_to_write_one(tmp_path: Path) -> None:
    for words in (["--run.steps"], ["--run.steps", "--run.seed=1"]):
        assert "has no value; write --run.steps VALUE" in message(written(tmp_path, ""), *words)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--nprocs", "2"], "no such key or option; did you mean --nproc?"),
        (["-n", "2"], "there is no option -n; did you mean --nproc?"),
        (["--restart", "2"], "did you mean --restarts?"),
        (["--dry-run"], "there is no key or option --dry-run. `shardwise train --help` lists all."),
        (["--bf16"], "there is no key or option --bf16; did you mean sharding.precision?"),
        (["other.yaml"], "'other.yaml' is an unexpected argument"),
    ],
)
def test_what_was_meant_for_the_command_is_answered_with_its_options(
    tmp_path: Path, words: list[str], answer: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(written(tmp_path, ""), words, ("--nproc", "--restarts"))
    assert answer in str(caught.value)


def test_a_wrong_override_is_blamed_and_not_the_file(tmp_path: Path) -> None:
    text = message(written(tmp_path, "model: {width: 64}\n"), "--model.width", "3x")
    assert text.startswith("override --model.width is '3x'")


def test_an_override_of_a_whole_table_is_blamed_for_what_is_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, "sharding: {strategy: zero2}\n")
    text = message(path, "--sharding.precision", "{average: foo}")
    assert text.startswith("override --sharding.precision: sharding.precision.average is 'foo'")


def test_a_list_of_words_says_which(tmp_path: Path) -> None:
    text = message(written(tmp_path, ""), "--logging.trackers", "foo")
    assert text.endswith("a list of tensorboard, trackio, wandb, mlflow, such as [tensorboard].")


def test_the_list_of_offload_is_answered_by_its_mode(tmp_path: Path) -> None:
    text = message(written(tmp_path, ""), "--sharding.offload", "[gradients, optimizer]")
    assert text.endswith("write offload: optimizer")


@pytest.mark.parametrize(
    ("override", "blame"),
    [
        (["--model.heads", "3"], "override --model.heads 3: width 64 over 3 heads"),
        (
            ["--run.patience", "5"],
            "override --run.patience 5: run.patience is 5 and run.eval_every is",
        ),
        (["run.seed=1"], "r.yaml:1: model: width 64 over 5 heads"),
        (
            ["--run.eval_every=epoch", "--data.max_bytes=9", "--data.streaming={streams: 4}"],
            "run.eval_every is epoch, and how long streamed text is, is not known",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_blamed_on_the_override(
    tmp_path: Path, override: list[str], blame: str
) -> None:
    heads = 5 if "seed" in blame or "r.yaml" in blame else 4
    assert blame in message(written(tmp_path, f"model: {{width: 64, heads: {heads}}}"), *override)


def test_an_override_inside_a_short_form_says_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path, "sharding: {precision: bf16}\n")
    assert "gives precision as 'bf16'" in message(
        path, "--sharding.precision.reduce_dtype", "float32"
    )


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = read_recipe(
        written(tmp_path, "sharding: {precision: bf16, wrap: [Block]}\nsample: {prompt: 'no'}\n")
    )
    assert read_recipe(written(tmp_path, to_yaml(recipe), "again.yaml")) == recipe


def test_whole_epochs_are_written_as_whole_numbers(tmp_path: Path) -> None:
    run = "run: {epochs: 3, eval_every: epoch, eval_delay: 0.5}\n"
    text = to_yaml(read_recipe(written(tmp_path, run)))
    assert "  epochs: 3\n" in text
    assert "  eval_delay: 0.5\n" in text


def test_the_demo_runs_again_and_on_its_two_processes() -> None:
    demo = read_recipe(Path(__file__).parents[2] / "recipes" / "demo.yaml")
    assert demo.run.overwrite
    assert demo.run.device == "cpu"
    assert accumulation(demo.batch, ranks=2) == 1


def test_keys_are_every_leaf_once() -> None:
    names = [key.name for key in keys()]
    assert len(names) == len(set(names))
    assert {"optimizer.lr", "sharding.precision.param_dtype", "run.folder"} <= set(names)
    assert "sharding.precision" not in names


def test_a_tree_is_flat_by_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {
        "a.b": 1,
        "a.c.d": [2],
        "e": None,
    }
    whole = flatten(Recipe().model_dump())
    of_a_folder = ("model.from", "model.revision", "model.dtype", "model.quantization.")
    names = {key.name for key in keys() if not key.name.startswith(of_a_folder)}
    assert set(whole) == names
