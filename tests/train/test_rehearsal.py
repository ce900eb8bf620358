"""A rehearsal: what is small in it, and that what it proves can fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ShardwiseError
from shardwise.recipe.read import read_recipe, to_yaml
from shardwise.recipe.recipe import Recipe
from shardwise.train.data import prepare
from shardwise.train.folder import Folder
from shardwise.train.packed import SampleRows
from shardwise.train.rehearsal import Rehearsal
from shardwise.train.rehearsal_files import samples
from shardwise.train.samples import read_samples
from tests.cli.test_train import run as run_command
from tests.train.runs import Watched

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TOKENS = ["<tool>", "<answer>"]
OFTEN = ("stdlib-qlora",)  # all in make prove
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.stem in OFTEN else pytest.mark.prove) for p in RECIPES],
    ids=lambda path: path.stem,
)
def test_every_recipe_has_a_small_one_that_reads_what_is_there(tmp_path: Path, path: Path) -> None:
    rehearsal = Rehearsal(read_recipe(path), tmp_path)
    small, alone = rehearsal.small(), rehearsal.small(1)
    assert small.run.device == "cpu"
    assert small.model_dump() | {"run": None} == alone.model_dump() | {"run": None}
    assert small.data.source == "stdlib" or Path(small.data.source).is_file()
    (tmp_path / "small.yaml").write_text(to_yaml(small), "utf-8")
    assert read_recipe(tmp_path / "small.yaml") == small
    changed = {name: (before, after) for name, before, after in rehearsal.changes()}
    assert changed["run.folder"][1] == str(tmp_path / "ranks-2")
    epochs = rehearsal.recipe.run.epochs
    assert small.run.epochs == epochs
    assert changed.get("run.epochs") == (epochs and (f"{epochs:g}", f"{epochs:g}, 40 samples"))
    assert ("run.steps" in changed) == (epochs is None)
    base = changed.get("model.from", ("", ""))[1]
    assert base.endswith("random, 2 layers of width 64") == (small.model.source is not None)
    assert all(before != after for before, after in changed.values())


def test_nothing_is_sent_to_other_workers_or_to_the_run_s_mirror(tmp_path: Path) -> None:
    others = ["outer.method=diloco", "outer.workers=[a:1, b:1]", "checkpoint.mirror=memory://run"]
    small = Rehearsal(read_recipe("demo", others), tmp_path).small()
    assert (small.outer.method, small.checkpoint.mirror) == ("none", None)


@pytest.mark.prove
def test_streamed_samples_have_a_second_file_for_validation(tmp_path: Path) -> None:
    path = next(path for path in RECIPES if path.stem == "llama2-70b-lora")
    overrides = ["data.streaming.streams=16", "data.validation_source=held-out.jsonl"]
    overrides += ["data.packing=true", "run.epochs=null", "sample.tokens=0"]
    overrides += ["run.eval_every=9", "checkpoint.save_every=9"]
    small = Rehearsal(read_recipe(path, overrides), tmp_path).small()
    assert small.data.validation_source == str(tmp_path / "validation.jsonl")
    assert (small.data.streaming.streams, small.data.streaming.epochs) == (4, None)
    training, validation = read_samples(small.data)
    assert (len(training.samples), len(validation.samples)) == (0, 40)


@pytest.fixture(params=["llama2-70b-lora", pytest.param("demo", marks=pytest.mark.prove)])
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Rehearsal:
    """Run a recipe, on two threads and on one."""
    path = next(path for path in RECIPES if path.stem == request.param)
    overrides = ["sample.tokens=0"]
    if request.param == "llama2-70b-lora":
        overrides += [f"adapter.new_tokens=[{', '.join(TOKENS)}]", "model.revision=main"]
    rehearsal = Rehearsal(read_recipe(path, overrides), tmp_path)
    for ranks in (2, 1):
        Watched(monkeypatch).run(rehearsal.small(ranks), ranks)
    return rehearsal


@pytest.mark.prove
def test_both_runs_have_the_same_losses_and_other_libraries_load_the_result(run: Rehearsal) -> None:
    losses, model, *adapter = run.proof()
    assert "losses of 2 ranks equal those of one process: at most " in losses
    is_half = run.recipe.sharding.precision.param_dtype == "bfloat16"
    assert float(losses.split("at most ")[1].split()[0]) < (1e-3 if is_half else 1e-5)
    assert len(adapter) == is_half
    loaded = "the adapter in plain peft" if is_half else "the model in plain transformers"
    assert model.startswith(f"{loaded} has the validation loss ")
    if is_half:
        weights = run.folder / "ranks-2" / "adapter" / "adapter_model.safetensors"
        before = weights.read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(weights.parent)
        assert tokenizer.convert_tokens_to_ids(TOKENS) == [len(tokenizer) - 2, len(tokenizer) - 1]
        rows = {n: t for n, t in load_file(weights).items() if "trainable_tokens" in n}
        assert [tuple(t.shape) for t in rows.values()] == [(2, 64)] * 2  # embedding and head
        assert all(not torch.equal(*t) for t in rows.values())  # both began at the mean
        save_file({name: torch.zeros_like(t) for name, t in load_file(weights).items()}, weights)
        with pytest.raises(
            ShardwiseError, match="the last validation and the adapter in plain pef"
        ):
            list(run.proof())
        weights.write_bytes(before)
    path = run.folder / "ranks-1" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    last = next(line for line in reversed(lines) if line["record"] == "evaluated")
    last["loss"] *= 1.002
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    with pytest.raises(ShardwiseError, match=r"losses of 2 ranks and of one process are 2\.0e-03"):
        next(run.proof())


@pytest.mark.parametrize("kind", ["alpaca", "completion"])
def test_samples_are_read_as_the_format_says(tmp_path: Path, kind: str) -> None:
    path = samples(kind, tmp_path)
    data = {"source": str(path), "format": kind, "context": 256, "validation": 0.25}
    recipe = Recipe.model_validate({"data": data, "tokenizer": {"vocabulary": 400}})
    rows = prepare(recipe, LocalComm(), Folder(tmp_path)).training
    assert isinstance(rows, SampleRows)
    every = np.arange(len(rows))
    assert 0 < rows.targets(every) < len(rows) * 256


@pytest.mark.spawn
@pytest.mark.prove
@pytest.mark.parametrize("name", ["demo", "llama3-8b-qlora"])
def test_the_command_says_what_is_small_runs_twice_and_proves(tmp_path: Path, name: str) -> None:
    folder, path = tmp_path / "run", next(path for path in RECIPES if path.stem == name)
    done = run_command("shardwise", "train", str(path), "--rehearse", f"run.folder={folder}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"rehearsal of {folder}: the same path on 2 CPU ranks, in small:"
    assert f"{folder}-rehearsal/ranks-2" in next(line for line in lines if "run.folder" in line)
    assert sum(line.startswith("proved ") for line in lines) == 2 + (name != "demo")
    assert sum(line.startswith("done ") for line in lines) == 1  # of the run on two ranks
