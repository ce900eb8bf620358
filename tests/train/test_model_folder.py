"""``model.from``: a folder of the hub is trained, and the run's folder is one as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.reader import CheckpointReader
from shardwise.cli.other_libraries import without_their_noise
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.recipe.read import read_recipe, to_yaml
from shardwise.recipe.recipe import Recipe
from shardwise.train import memory_estimate
from shardwise.train.memory_estimate import check_memory, predict
from shardwise.train.model_folder import load, longest_row, on_meta, with_tokenizer
from tests.copies import error_text
from tests.hf.folders import CHAT_TEMPLATE, END, tiny
from tests.train.runs import Watched, losses
from tests.train.tiny import text_folder

RECIPE = """\
model: {from: HUB}
data: {source: TEXT, context: 16, validation: 0.2}
batch: {rows: 12, micro: 2}
optimizer: {lr: 1e-3, warmup: 2, eps: 1e-4}
sample: {prompt: "def", tokens: 4}
run: {folder: RUN, steps: 4, eval_every: 2, eval_rows: 7, device: cpu}
"""


FLOAT32 = ["model.dtype=float32"]


def recipe_of(path: Path, *overrides: str) -> Recipe:
    text = RECIPE.replace("HUB", str(path / "hub")).replace("TEXT", str(text_folder(path / "text")))
    (path / "r.yaml").write_text(text.replace("RUN", str(path / "run")), "utf-8")
    return read_recipe(path / "r.yaml", overrides)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_folder_is_trained_and_the_run_s_folder_is_one(tmp_path: Path, watched: Watched) -> None:
    tiny("llama", tmp_path / "hub")
    recipe = recipe_of(tmp_path, "sharding.precision.stored_dtype=bfloat16")
    watched.run(recipe, 2)
    run = tmp_path / "run"
    loader: Any = hf.AutoModelForCausalLM
    model, info = loader.from_pretrained(run, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype is torch.bfloat16
    before = load_file(tmp_path / "hub" / "model.safetensors")
    assert all(
        not torch.equal(value, before[n])
        for n, value in load_file(run / "model.safetensors").items()
        if value.ndim > 1
    )
    tokenizer = hf.AutoTokenizer.from_pretrained(run)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (run / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()
    trained = loader.from_pretrained(run / "checkpoints" / "latest")
    assert type(trained) is type(model)
    first, *_, last = losses(recipe)
    assert last < first


def test_without_a_dtype_in_its_config_a_folder_has_that_of_its_files(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    file = folder / "model.safetensors"
    save_file({n: value.bfloat16() for n, value in load_file(file).items()}, file, {"format": "pt"})
    dtypes = {next(on_meta(recipe_of(tmp_path, *to)).parameters()).dtype for to in ([], FLOAT32)}
    assert dtypes == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("new", [[], ["adapter={rank: 2, new_tokens: [<tool>]}"]])
def test_of_a_name_on_the_hub_the_memory_is_known_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched, new: list[str]
) -> None:
    hub, cache = tiny("llama", tmp_path / "hub"), tmp_path / "cache"
    config = json.loads((hub / "config.json").read_text("utf-8"))

    def fetched(name: str, allow_patterns: list[str], **_: object) -> str:
        assert name == "owner/name"
        every = {path.name for pattern in allow_patterns for path in hub.glob(pattern)}
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        for file in every:
            shutil.copy(hub / file, cache)
        return str(cache)

    def headers(name: str, revision: str) -> object:
        assert (name, revision, config.get("dtype")) == ("owner/name", "main", None)
        with CheckpointReader.open(hub) as reader:
            stored = {n: location.stored for n, location in reader.weights().items()}
        hub_types: Any = huggingface_hub.utils
        tensors = {n: hub_types.TensorInfo(s.dtype, s.shape, s[2:]) for n, s in stored.items()}
        files = {"model.safetensors": hub_types.SafetensorsFileMetadata({}, tensors)}
        return hub_types.SafetensorsRepoMetadata(None, False, dict.fromkeys(tensors, *files), files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    known = recipe_of(tmp_path, *new)
    name = recipe_of(tmp_path, "model.from=owner/name", "model.revision=main", *new)
    with without_their_noise():
        assert predict(name, 2) == predict(known, 2)
        assert new or [path.name for path in cache.iterdir()] == ["config.json"]
        assert not list(cache.glob("*.safetensors"))
        del config["dtype"]
        (hub / "config.json").write_text(json.dumps(config), "utf-8")
        assert predict(name, 2) == predict(known, 2)
        monkeypatch.setattr(memory_estimate, "machine_memory", lambda **_: 0)
        with pytest.raises(ConfigError, match=r"on this cpu, which has "):
            watched.run(name, 1)
    assert not list(cache.glob("*.safetensors"))


@pytest.mark.prove
def test_a_run_goes_on_from_its_checkpoint_at_another_number_of_ranks(
    tmp_path: Path, watched: Watched
) -> None:
    tiny("llama", tmp_path / "hub")
    whole = recipe_of(tmp_path, f"run.folder={tmp_path / 'whole'}")
    watched.run(whole, 1)
    watched.killed(recipe_of(tmp_path, "checkpoint.save_every=2"), 2, at=(4, 1, 1))
    watched.run(recipe_of(tmp_path, "checkpoint.save_every=2"), 3)
    assert losses(recipe_of(tmp_path))[-1] == pytest.approx(losses(whole)[-1], rel=1e-5)


# --- what is checked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["model.width=64", "model.layers=2"],
            "whose config.json says its shape; remove layers, width.",
        ),
        (["model.from=null", "model.revision=main"], "revision are of a folder that is read, and"),
        (["model.dtype=int3"], "model.dtype is 'int3'; it must be"),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(tmp_path, *overrides)
    assert text in str(caught.value)


def test_a_recipe_is_written_with_the_keys_that_have_an_effect(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "model.dtype=bf16")
    text = to_yaml(recipe)
    assert text.startswith(
        f"model:\n  from: {tmp_path / 'hub'}\n  revision: null\n  dtype: bfloat16\n  quantization:"
    )
    (tmp_path / "again.yaml").write_text(text, "utf-8")
    assert read_recipe(tmp_path / "again.yaml") == recipe


def test_the_tokenizer_is_the_folder_s_unless_the_recipe_names_one(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "hub")
    own = with_tokenizer(recipe_of(tmp_path)).tokenizer
    assert (own.source, own.end) == (str(folder), END)
    other = with_tokenizer(recipe_of(tmp_path, "tokenizer.source=x", "tokenizer.end=y")).tokenizer
    assert (other.source, other.end) == ("x", "y")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer; name one in tok"):
        with_tokenizer(recipe_of(tmp_path))


def test_a_model_that_is_too_small_for_the_data_is_refused(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "hub")
    with pytest.raises(ConfigError, match="the tokenizer has 321 token ids, and the model in"):
        load(recipe_of(tmp_path), LocalComm(), 321)
    with pytest.raises(ConfigError, match="takes rows of 64 tokens at most; set data"):
        with_tokenizer(recipe_of(tmp_path, "data.context=65"))


def test_a_model_that_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its config alone: there are no weights here."""
    (tiny("llama", tmp_path / "hub") / "model.safetensors").unlink()
    recipe, cpu = recipe_of(tmp_path), torch.device("cpu")
    row = predict(recipe, 2)
    assert row.parameters == row.gradients == pytest.approx(2 * 36_000, rel=0.01)
    needed = row.between_steps
    monkeypatch.setattr(memory_estimate, "machine_memory", lambda **_: needed - 1)
    text = error_text(ConfigError, lambda: check_memory(recipe, cpu, 2))
    assert text.startswith("with gradients and optimizer state, the model in ")
    assert f"full_shard over 2 ranks takes {size(needed)} for the 1 of them on this cpu" in text
    monkeypatch.setattr(memory_estimate, "machine_memory", lambda **_: needed)
    assert check_memory(recipe, cpu, 2) is not None
    assert predict(recipe_of(tmp_path, "model.dtype=bf16"), 1).parameters == 2 * 36_000


def test_a_config_without_a_positive_number_of_positions_takes_rows_of_any_length() -> None:
    assert longest_row(hf.LlamaConfig(max_position_embeddings=64)) == 64
    assert longest_row(hf.XLNetConfig()) is None  # whose number is -1
    assert longest_row(hf.BloomConfig()) is None  # which has none
