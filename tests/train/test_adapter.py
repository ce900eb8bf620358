"""A run whose recipe has an adapter: the base is read, the adapter alone is saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from shardwise.cli.export import ExportArguments, run_export
from shardwise.cli.format_records import format_record
from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.train.comparison import Predicted
from shardwise.train.loop import train
from shardwise.train.records import Built, Finished, Placed, Record
from tests.hf.folders import tiny
from tests.train.tiny import text_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RECIPE = """\
model: {from: BASE}
adapter: {rank: 2, targets: [q_proj, down_proj]}
data: {source: TEXT, context: 16, validation: 0.2}
batch: {rows: 4, micro: 1}
optimizer: {lr: 1e-2, schedule: constant, eps: 1e-4}
checkpoint: {save_every: 2}
sample: {tokens: 0}
run: {folder: RUN, steps: 4, eval_rows: 4, device: cpu}
"""


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.results.plot_loss", lambda _, __, path: path.touch())


def recipe(path: Path, *overrides: str) -> Recipe:
    if not (path / "base").exists():
        tiny("llama", path / "base")
        text_folder(path / "text")
    words = {"BASE": "base", "TEXT": "text", "RUN": "run"}
    text = RECIPE
    for word, name in words.items():
        text = text.replace(word, str(path / name))
    (path / "tiny.yaml").write_text(text, "utf-8")
    return read_recipe(path / "tiny.yaml", overrides)


def run(recipe: Recipe, world: int) -> list[Record]:
    records: list[Record] = []
    threads.run(world, lambda comm: train(recipe, comm, records.append), 60)
    return records


def check_prediction(records: list[Record]) -> None:
    """What was predicted from the config alone is what the tensors of rank 0 sum to."""
    (predicted,) = [record for record in records if isinstance(record, Predicted)]
    (placed,) = [record for record in records if isinstance(record, Placed)]
    measured = {row.kind: row.per_rank[0] for row in placed.rows}
    assert measured["parameters"] == predicted.parameters
    assert measured["gradients"] == predicted.gradients
    assert measured["optimizer state"] == predicted.optimizer


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "run" / "adapter" / "adapter_model.safetensors")


def check_step(path: Path, step: Path) -> None:
    """A step's folder is an adapter's, too: for peft, and for transformers."""
    assert not (step / "config.json").exists()
    assert [path.name for path in step.glob("*.safetensors")] == ["adapter_model.safetensors"]
    stored, expected = load_file(step / "adapter_model.safetensors"), weights(path)
    assert set(stored) == set(expected)
    assert all(torch.equal(stored[name], value) for name, value in expected.items())
    of_folder = peft.PeftConfig.from_pretrained
    config, final = of_folder(str(step)), of_folder(str(path / "run" / "adapter"))
    assert config.to_dict() == final.to_dict()
    base: Any = hf.AutoModelForCausalLM.from_pretrained(path / "base")
    by_peft: Any = peft.PeftModel.from_pretrained(base, step)
    copied = shutil.copytree(step, path / "copied")
    config.base_model_name_or_path = str(path / "base")
    config.save_pretrained(copied)
    by_transformers: Any = hf.AutoModelForCausalLM.from_pretrained(copied)
    for model in (by_peft, by_transformers):
        values = [value for name, value in model.state_dict().items() if "lora" in name]
        assert len(values) == len(expected)
        assert all(value.any() for value in values)  # B begins at zero


def test_it_saves_what_plain_peft_loads_and_says_what_matched(tmp_path: Path) -> None:
    records = run(recipe(tmp_path, "sharding.unsharded=1000000"), 2)  # frozen units stay gathered
    (built,) = [record for record in records if isinstance(record, Built)]
    (finished,) = [record for record in records if isinstance(record, Finished)]
    check_prediction(records)
    lines = [line.strip() for line in format_record(built)]
    assert "q_proj           2  model.layers.*.self_attn.q_proj" in lines
    assert "trainable params: 576 || all params: 36,576 || trainable%: 1.5748" in lines
    assert [name for name in finished.files if name.startswith("adapter/ (")]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    base: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    assert all(value.any() for value in weights(tmp_path).values())  # B begins at zero
    check_step(tmp_path, tmp_path / "run" / "checkpoints" / "step-4")
    with pytest.raises(ConfigError, match=r"step-4 holds an adapter and not a whole model"):
        run_export(tmp_path / "run", tmp_path / "out", ExportArguments())
    run_export(tmp_path / "run", tmp_path / "whole", ExportArguments(with_optimizer=True))


def test_new_tokens_need_the_tokenizer_of_the_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"new_tokens are <a>, <b>, which are added to the token"):
        recipe(tmp_path, "adapter.new_tokens=[<a>, <b>]", f"tokenizer.source={tmp_path}")


@pytest.mark.prove
def test_it_goes_on_from_a_checkpoint_of_the_adapter_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    run(recipe(first), 2)
    run(recipe(second, "--run.steps", "2"), 2)
    run(recipe(second), 2)
    assert "left out" not in caplog.text
    expected, resumed = weights(first), weights(second)
    assert {
        name for name, value in expected.items() if not torch.equal(value, resumed[name])
    } == set()
