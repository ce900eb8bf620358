"""An adapter merged into its base, file to file: the bits of ``merge_and_unload``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.cli import main
from shardwise.hf.merge import merged_weights
from tests.hf.folders import tiny

pytestmark = [  # peft asks transformers for what this one has renamed, and tells what it sets
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

TIED = {"tie_word_embeddings": True}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rsLoRA": ("llama", {}, {"target_modules": "all-linear", "use_rslora": True}),
    "DoRA": ("llama", {}, {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True}),
    "Conv1D": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"]}),
    "beside experts": ("mixtral", {}, {"target_modules": ["q_proj"]}),
    "experts": ("gpt_oss", {}, {"target_parameters": ["mlp.experts.down_proj"]}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj"], "bias": "all", "lora_bias": True}),
    "a head": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 9]}),
    "tied embeddings": (
        "llama",
        TIED,
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
}


def base_of(folder: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder)


def written(
    base: Path, options: dict[str, Any], folder: Path, embeddings: bool | str = False
) -> Path:
    """An adapter of plain peft, with no tensor at zero."""
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model: Any = peft.get_peft_model(base_of(base), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return folder


def exported(base: Path, adapter: Path, merged: Path, *options: str) -> object:
    """The exit code of ``shardwise export --merge``."""
    with pytest.raises(SystemExit) as ended:
        main(["export", str(base), str(merged), "--merge", str(adapter), *options])
    return ended.value.code


def assert_merged(base: Path, adapter: Path, folder: Path) -> dict[str, Tensor]:
    """The values in ``folder``, which are those of peft."""
    merged = peft.PeftModel.from_pretrained(base_of(base), adapter).merge_and_unload()
    expected: dict[str, Tensor] = merged.state_dict()
    loaded: dict[str, Tensor] = base_of(folder).state_dict()
    assert expected.keys() == loaded.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name
    return loaded


@pytest.mark.parametrize("embeddings", ["auto", True])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_proj"])
def test_an_adapter_may_hold_embeddings_of_its_base_as_peft_stores_them(
    target: str, embeddings: bool | str, tmp_path: Path
) -> None:
    base = tiny("llama", tmp_path / "base")
    adapter = written(base, {"target_modules": [target]}, tmp_path / "adapter", embeddings)
    assert exported(base, adapter, tmp_path / "merged") == 0
    assert_merged(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize(("architecture", "shape", "options"), KINDS.values(), ids=KINDS)
def test_the_files_are_those_of_merge_and_unload(
    architecture: str, shape: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    base = tiny(architecture, tmp_path / "base", **shape)
    adapter = written(base, options, tmp_path / "adapter")
    assert exported(base, adapter, tmp_path / "merged") == 0
    loaded = assert_merged(base, adapter, tmp_path / "merged")
    changed = base_of(base).state_dict()
    assert any(not torch.equal(changed[name], value) for name, value in loaded.items())
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_the_tokenizer_that_lies_beside_an_adapter_takes_the_place_of_the_base_s(
    tmp_path: Path,
) -> None:
    base = tiny("llama", tmp_path / "base")
    (base / "added_tokens.json").write_text('{"<old>": 1}', "utf-8")  # of an older transformers
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool>"])
    new = tokenizer.convert_tokens_to_ids("<tool>")
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [new]}
    adapter = written(base, options, tmp_path / "adapter")
    tokenizer.save_pretrained(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the command leaves out what other libraries say each time
        assert exported(base, adapter, tmp_path / "merged") == 0
    merged = hf.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.encode("<tool>", add_special_tokens=False) == [new]
    assert merged.chat_template == tokenizer.chat_template
    assert not (tmp_path / "merged" / "added_tokens.json").exists()


def test_only_one_weight_of_the_base_is_in_memory(tmp_path: Path) -> None:
    base = tiny("llama", tmp_path / "base")
    adapter = written(base, {"target_modules": "all-linear"}, tmp_path / "adapter")
    with CheckpointReader.open(base) as source:
        changed = merged_weights(source, adapter)
        assert len(changed) == 2 * 7
        layer: Any = next(iter(changed.values())).args[0]  # type: ignore[attr-defined]
        next(iter(changed.values()))()
        assert layer.get_base_layer().weight.is_meta


def test_it_is_cast_on_the_way_and_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny("llama", tmp_path / "base")
    adapter = written(base, {"target_modules": ["q_proj"]}, tmp_path / "adapter")
    assert exported(base, adapter, tmp_path / "half", "--dtype", "bfloat16") == 0
    assert base_of(tmp_path / "half").dtype == torch.bfloat16
    large = written(base, {"target_modules": ["q_proj"], "lora_alpha": 10**7}, tmp_path / "large")
    assert exported(base, large, tmp_path / "large-half", "--dtype", "float16") == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "values of model.layers.0.self_attn.q_proj.weight do not fit" in text


@pytest.mark.parametrize(
    ("architecture", "shape", "options", "message"),
    [
        (
            "llama",
            TIED,
            {"target_modules": ["lm_head"]},
            "changes 1 of 2, so one weight cannot be both",
        ),
        (
            "gpt2",
            TIED,
            {"target_modules": ["wte"], "modules_to_save": ["lm_head"]},
            "tied in the base, unlike each other",
        ),
        ("llama", {}, {"target_modules": ["q_proj"], "lora_bias": True}, "adds a bias to"),
        (
            "phi",
            TIED,
            {
                "target_modules": ["dense"],
                "modules_to_save": ["lm_head"],
                "ensure_weight_tying": True,
            },
            "and not its bias",  # which peft forgets
        ),
        ("mixtral", {}, {"target_modules": ["w1", "w2", "w3"]}, "under another name or in parts"),
    ],
    ids=["one of two tied", "both unlike", "no bias", "a bias lost", "another name"],
)
def test_what_cannot_be_merged_is_refused(
    architecture: str, shape: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = tiny(architecture, tmp_path / "base", **shape)
    adapter = written(base, options, tmp_path / "adapter")
    with CheckpointReader.open(base) as source, pytest.raises(sw.CheckpointError, match=message):
        [make() for make in merged_weights(source, adapter).values()]


def test_a_base_that_is_no_model_is_refused(tmp_path: Path) -> None:
    base = tiny("llama", tmp_path / "base")
    adapter = written(base, {"target_modules": ["up_proj"]}, tmp_path / "adapter")
    (base / "config.json").write_text("{}")
    message = r"config\.json describes no model of this version of transformers"
    with CheckpointReader.open(base) as source, pytest.raises(sw.ConfigError, match=message):
        merged_weights(source, adapter)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = tiny("llama", tmp_path / "base")
    wide = tiny("llama", tmp_path / "wide", intermediate_size=64)
    adapter = written(wide, {"target_modules": ["up_proj"]}, tmp_path / "adapter")
    with CheckpointReader.open(base) as source, pytest.raises(sw.CheckpointError, match="stored"):
        merged_weights(source, adapter)
