from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.recipe.model_config import ModelConfig, TokenizerConfig
from shardwise.train import tokenizer as bpe
from shardwise.train.decoder import Decoder
from shardwise.train.folder import Folder
from shardwise.train.hf_config import WEIGHTS, config_files
from tests.train.tiny import documents

SHAPE = ModelConfig(width=24, layers=2, heads=6, kv_heads=2, hidden=40, rope_theta=5_000)


def exported(path: Path, tied: bool) -> Decoder:
    config = SHAPE.model_copy(update={"tied": tied})
    folder = Folder(path)
    obtained = bpe.load_or_train(folder, documents(), TokenizerConfig(vocabulary=300))
    for name, text in obtained.files.items():
        folder.write_text(name, text)
    tokenizer = bpe.load(obtained.text)
    model = Decoder(config, 300, context=32)
    sw.shard(model).save_file(path / WEIGHTS)
    for name, value in config_files(config, 300, 32, bpe.end_id(tokenizer), torch.float32).items():
        folder.write_text(name, json.dumps(value))
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_folder_with_equal_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = exported(tmp_path, tied)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    text = "def value(self):\n    return items"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0].tolist() == bpe.load((tmp_path / "tokenizer.json").read_text()).encode(text).ids
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer([text, "x"], padding=True)["attention_mask"][1][-1] == 0
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids).logits)


def test_whoever_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    exported(tmp_path, tied=True)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert "model.safetensors" in {path.name for path in files}
    assert len({path.stat().st_mode for path in files}) == 1


def test_transformers_knows_the_end_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    exported(tmp_path, tied=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == bpe.END
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.eos_token_id == 0


def test_saved_tensors_are_the_trained_ones_and_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    states = exported(tmp_path, tied=True).state_dict()
    saved = load_file(tmp_path / "model.safetensors")
    assert set(states) - set(saved) == {"lm_head.weight"}
    assert all(torch.equal(saved[name], states[name]) for name in saved)
