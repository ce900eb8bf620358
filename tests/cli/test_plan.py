"""``shardwise plan``: a verdict in one line, what it rests on, and an exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import main
from shardwise.cli.models import named_model
from shardwise.cli.plan import quantity, whole_rows
from shardwise.recipe.read import read_recipe
from tests.hf.folders import tiny
from tests.train.tiny import recipe_file


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    out, error = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, error


def test_a_recipe_is_judged_as_it_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small, written = tmp_path / "demo.yaml", tmp_path / "new.yaml"
    demo = Path("recipes/demo.yaml").read_text("utf-8")
    small.write_text(demo.replace("layers: 4", "layers: 1"))
    options = ("--gpus", "4xL4", "--strategy", "zero1", "--why", "peak", "--write", str(written))
    code, out, _ = plan(capsys, str(small), *options, "--micro-batch", "4")
    assert code == 0
    first, second, *_ = out.splitlines()
    assert first.startswith("FITS on 4 × L4 24 GB: peak ")
    assert second == "with zero1, 4 rows, nothing recomputed"
    assert "rules of thumb" in out
    assert "kind  activations" in out
    recipe = yaml.safe_load(written.read_text())
    assert recipe["sharding"]["strategy"] == "zero1"
    assert recipe["batch"] == {"rows": 16, "micro": 4}
    assert recipe["model"]["width"] == 256


def test_a_folder_of_transformers_with_an_adapter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tiny("llama", tmp_path) / "config.json"
    options = ("--gpus", "2xRTX 4090", "--lora", "r=4", "--seq", "32", "--global-batch", "64")
    code, out, _ = plan(capsys, str(config), *options, "--json")
    report: dict[str, Any] = json.loads(out)
    assert code == 0
    assert report["verdict"] == "fits"
    assert report["by_kind"]["activations"] > 0
    assert {other["candidate"]["strategy"] for other in report["others"]} >= {"no_shard", "zero1"}
    models = [named_model(name).model for name in (str(config), str(tmp_path))]
    assert {type(model).__name__ for model in models} == {"LlamaForCausalLM"}


def test_a_strategy_and_a_micro_batch_narrow_the_search(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = str(tiny("llama", tmp_path) / "config.json")
    of_one = "--strategy", "zero1", "--micro-batch", "3", "--seq", "32"
    _, out, _ = plan(capsys, config, "--gpus", "2xL4", "--json", *of_one)
    report: dict[str, Any] = json.loads(out)
    assert report["searched"] > 10
    assert report["candidate"]["strategy"] == "zero1"
    assert report["candidate"]["micro_batch"] == 3
    code, _, error = plan(capsys, config, "--gpus", "2xL4", "--strategy", "hybrid_shard")
    assert code == 1
    assert "one host of 2. Plan for more nodes" in " ".join(error.split())


@pytest.mark.parametrize(
    ("asked", "rows"), [(30.5, 32), (31.0, 31), (3000.3, 3008), (4.4, 4), (0.9, 1)]
)
def test_a_rank_s_rows_are_such_as_split(asked: float, rows: int) -> None:
    assert whole_rows(asked) == rows


def test_a_batch_of_no_whole_rows_is_one_that_splits_and_the_plan_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = "--gpus", "2xL4", "--seq", "32", "--strategy", "zero1", "--global-batch"
    config = str(tiny("llama", tmp_path) / "config.json")
    _, out, _ = plan(capsys, config, *few, "1Ktok", "--json")  # 15.6 rows
    report: dict[str, Any] = json.loads(out)
    assert (report["step_tokens"], report["asked"]) == (1024, 1000)
    assert report["candidate"]["micro_batch"] > 1
    _, out, _ = plan(capsys, config, *few, "1Ktok")
    assert "a step has 1,024 tokens, and not the 1,000 asked for" in out
    _, out, _ = plan(capsys, config, *few, "960")  # 15 rows: no power of two but 1
    assert re.search(r"with zero1, (3|5|15) rows", out)
    assert "asked for" not in out


def test_a_row_has_two_tokens_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = plan(capsys, "nowhere", "--seq", "1")
    assert code == 2
    assert "'--seq': 1 is not in the range x>=2" in error


def test_a_file_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "old.yaml"
    written.write_text("mine")
    code, _, error = plan(capsys, "recipes/demo.yaml", "--write", str(written))
    assert code == 1
    assert "old.yaml exists" in error
    assert written.read_text() == "mine"
    code, _, error = plan(capsys, "nowhere", "--write", str(tmp_path / "none" / "new.yaml"))
    assert code == 2  # and no model was looked for
    assert f"the folder {tmp_path / 'none'} does not exist" in " ".join(error.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "8xH1000"), "nearest is 'H100"),
        (("--gpus", "H100"), "such as 8xH100"),
        (("--gpus", "2xL4", "--link", "string"), "no link is called 'string'"),
        (("--gpus", "2xL4", "--lora", "r=4"), "--lora and --quantize are for models of transf"),
        (("--gpus", "2xL4", "--micro-batch", "3"), "such as 18"),
        (("--gpus", "2xL4", "--global-batch", "many"), "no quantity"),
        (("--gpus", "4xL4", "--global-batch", "130"), "nearest is --global-batch 4,096"),
        (("--gpus", "2xL4", "--tokens", "1..5B"), "'1..5B' is no quantity"),
        (("--gpus", "2xL4", "--tokens", "0"), "'0' is no quantity"),
        (("--gpus", "2xL4", "--link", "0Gb/s"), "no link is called '0Gb/s'"),
        (("--gpus", "2xL4", "--link", "100Mbit/s"), "between nodes, and there is one"),
        (("--gpus", "2xL4", "--lora", "r=0"), "--lora r=0 names no rank"),
        (("--gpus", "2xL4", "--machines", "README.md"), "README.md holds no machines"),
        (("--gpus", "0xL4"), "such as 8xH100"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, error = plan(capsys, "recipes/demo.yaml", *arguments)
    assert code == 1
    assert sentence in " ".join(error.split())


def test_a_terminal_is_told_that_a_model_is_being_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "planning nowhere" in plan(capsys, "nowhere")[2]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1Mtok", 10**6), ("15B", 15 * 10**9), ("4,096", 4096), ("2.5k", 2500), ("1 Mtokens", 10**6)],
)
def test_quantities_are_read_as_people_write_them(text: str, number: int) -> None:
    assert quantity(text) == number


def test_what_is_written_for_a_folder_is_a_recipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, written = tiny("gemma2", tmp_path), tmp_path / "new.yaml"  # with capped scores
    changes = ("--lora", "r=4", "--quantize", "nf4", "--seq", "32", "--global-batch", "64")
    code, out, _ = plan(capsys, str(folder), "--gpus", "2xL4", *changes, "--write", str(written))
    assert code == 0
    recipe = read_recipe(written)
    assert recipe.model.source == str(folder)
    assert (recipe.adapter.rank, recipe.model.quantization.bits, recipe.data.context) == (4, 4, 32)
    assert recipe.batch.rows == 2
    assert f"with {recipe.sharding.strategy}, {recipe.batch.micro} row" in out


FALCON = {"model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4}  # asks for sdpa
PADDED = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "pad_token_id": 0}  # looks for padding


@pytest.mark.parametrize("config", [FALCON, PADDED], ids=["falcon", "gpt2"])
def test_code_that_needs_masks_or_values_is_planned_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any]
) -> None:
    few = {"num_hidden_layers": 1, "vocab_size": 64, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | few))
    one = ("--gpus", "1xL4", "--micro-batch", "1", "--strategy", "no_shard")
    code, out, error = plan(capsys, str(tmp_path), *one, "--seq", "32")
    assert (code, error) == (0, "")
    assert out.startswith("FITS on 1 × L4")


def test_rows_that_training_would_refuse_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(tiny("llama", tmp_path))  # for 64 tokens
    code, _, error = plan(capsys, folder, "--gpus", "1xL4", "--seq", "65")
    assert code == 1
    assert "takes rows of 64 tokens at most" in " ".join(error.split())


def test_parameters_are_counted_alike_however_many_bits_they_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = ("--seq", "32", "--micro-batch", "1", "--strategy", "no_shard")
    question = (str(tiny("llama", tmp_path)), "--gpus", "2xL4", "--lora", "r=4", *one)
    for bits in ((), ("--quantize", "nf4"), ("--quantize", "int8")):
        rules = plan(capsys, *question, *bits)[1].partition("rules of thumb")[2].splitlines()[1:]
        [rule] = rules  # none of strategies that were not searched
        assert rule.startswith("  take no_shard: 39,712 parameters are below 1 B ")


def test_what_does_not_fit_has_fixes_that_were_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = machine_of(tmp_path, memory=500_000, host_memory=0)
    folder, one = str(tiny("llama", tmp_path)), ("--seq", "32", "--micro-batch", "1")
    asked = (folder, "--machines", str(few), "--gpus", "1xfew", *one)
    code, out, _ = plan(capsys, *asked)
    assert code == 2
    fixes = out.partition("one thing at a time:")[2]
    report = json.loads(plan(capsys, *asked, "--json")[1])
    named = {fix["change"]: fix["fits"] for fix in report["fixes"]}
    assert {"--lora r=16", "--lora r=16 --quantize nf4"} <= named.keys()
    assert list(named.values()) == sorted(named.values(), reverse=True)
    for change, fits in named.items():
        assert change in fixes
        if change.startswith("--") and fits:
            assert plan(capsys, *asked, *change.split())[0] == 0
    assert named["--lora r=16"]


def test_what_a_recipe_could_change_is_named_by_its_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few, folder = machine_of(tmp_path, memory=300_000, host_memory=0), tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 256, "head_dim": 64}))
    keys = {"model": {"from": str(folder), "dtype": "bfloat16"}}
    recipe, on = tmp_path / "own.yaml", ("--machines", str(few), "--gpus", "1xfew", "--json")
    rest = {"data": {"source": str(tmp_path), "context": 32}, "batch": {"rows": 1, "micro": 1}}

    def fixes(**more: Any) -> set[str]:
        recipe.write_text(yaml.safe_dump({**keys, **rest, **more}))
        named = {fix["change"] for fix in json.loads(plan(capsys, str(recipe), *on)[1])["fixes"]}
        return {change for change in named if change.startswith(("adapter.", "model."))}

    both = "adapter.rank: 16, model.quantization.bits: 4"
    assert fixes() == {"adapter.rank: 16", both}
    assert fixes(adapter={"rank": 4}) == {"model.quantization.bits: 4"}


def test_shorter_rows_are_offered_with_as_many_rows_and_time_is_a_factor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = machine_of(tmp_path, memory=500_000, host_memory=0)
    one = ("--seq", "32", "--micro-batch", "1", "--global-batch", "64")
    asked = (str(tiny("llama", tmp_path)), "--machines", str(few), "--gpus", "1xfew", *one)
    out = plan(capsys, *asked)[1]
    length, batch = map(int, re.findall(r"--seq (\d+) --global-batch (\d+)", out)[0])
    assert batch == 2 * length < 64
    assert re.search(r"; a token takes \d+\.\d\d × as long", out)


def machine_of(folder: Path, **numbers: float) -> Path:
    entry = {"bf16": 1e12, "fp32": 1e12, "products": 1, "attention": 0.5, "bandwidth": 1e11}
    names = {"inside": "NVLink 4", "between": "NDR InfiniBand", "source": "none"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**entry, **names, **numbers}.items()]
    file = folder / "few.toml"
    file.write_text("\n".join(["[accelerators.few]", "reserved = 0", *lines]))
    return file


def test_what_is_written_trains_as_it_was_chosen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "new.yaml"
    code, *_ = plan(capsys, str(recipe_file(tmp_path)), "--gpus", "2xL4", "--write", str(written))
    assert code == 0
    with pytest.raises(SystemExit) as caught:
        main(["train", str(written), "--run.steps", "1", "--run.eval_every", "1"])
    assert not caught.value.code
    assert "done      saved in" in capsys.readouterr().out


def test_no_recipe_names_a_function(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n"
    )
    model, written = f"{tmp_path}/net.py:build", tmp_path / "new.yaml"
    code, _, error = plan(capsys, model, "--gpus", "2xL4", "--write", str(written))
    assert code == 1
    assert "a recipe cannot name" in error
    assert not written.exists()


NETS = """
import torch
from dataclasses import dataclass
from torch import nn
@dataclass
class Out:
    first: torch.Tensor
    rest: tuple
class Net(nn.Linear):
    def forward(self, x):
        y = super().forward(x.float().flatten(1))
        return Out(y, (y * 2, None))
def rows():
    print("this is no part of the answer")
    return Net(12, 4), torch.zeros(8, 3, 4)
def tokens():
    return Net(12, 4), torch.zeros(8, 12, dtype=torch.int64)
def wrong():
    return nn.Linear(4, 4), torch.zeros(2, 5)
def frozen():
    return Net(12, 4).requires_grad_(False), torch.zeros(2, 12)
"""


@pytest.mark.parametrize(
    ("function", "code", "sentence"),
    [
        ("rows", 0, r"[\d,]+ rows/s per GPU"),
        ("tokens", 0, r"[\d,]+ tokens/s per GPU"),
        ("wrong", 1, r"stopped: RuntimeError: .*reduction dim.*"),
        ("frozen", 1, "no output of the model depends on a parameter that is trained"),
        ("", 1, "names no model"),
    ],
)
def test_a_function_s_model_is_judged_by_its_own_outputs_and_inputs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, function: str, code: int, sentence: str
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    ended, out, error = plan(capsys, f"{tmp_path}/nets.py:{function}", "--gpus", "2 × L4")
    assert ended == code
    assert re.search(sentence, " ".join((out + error).split()))
    assert "values" not in error


def test_a_misspelled_recipe_has_its_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended, _, error = plan(capsys, "stdlib-lorra", "--gpus", "2 × L4")
    assert ended == 1
    assert "or a shipped one such as 'stdlib-lora'" in error


def test_the_batch_of_a_function_s_model_is_in_what_its_input_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    options = "--gpus", "2xL4", "--json", "--micro-batch", "4", "--global-batch"
    for function, size in (("rows", "16"), ("tokens", str(16 * 12))):
        _, out, _ = plan(capsys, f"{tmp_path}/nets.py:{function}", *options, size)
        report = json.loads(out)
        assert report["counted"] == function
        assert report["tokens_per_second"] * report["seconds"] == pytest.approx(int(size) / 2)
    _, _, error = plan(capsys, f"{tmp_path}/nets.py:rows", "--gpus", "2xL4", "--seq", "8")
    assert "returns its own" in " ".join(error.split())


def test_a_calibration_takes_no_model_and_needs_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, error = plan(capsys, "demo", "--calibrate", str(tmp_path / "here.toml"))
    assert code != 0
    assert "--calibrate takes no MODEL" in error
    code, _, error = plan(capsys, "--calibrate", str(tmp_path / "none" / "here.toml"))
    assert code == 2
    assert f"the folder {tmp_path / 'none'} does not exist" in error
