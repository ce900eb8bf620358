"""What a folder of peft holds, by its names; peft itself is the measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.hf.adapters import load_adapter, save_adapter
from shardwise.hf.peft_files import config_text, on_meta, stored_names
from tests.checkpoint.runs import same
from tests.hf.folders import tiny
from tests.ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

BLOCK = "base_model.model.model.layers.0"
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("ignored", [(), (BLOCK,)], ids=["", "ignored"])
def test_names_and_files_are_those_of_peft_also_of_what_is_left_whole(
    tmp_path: Path, ignored: tuple[str, ...]
) -> None:
    folder = tiny("llama", tmp_path / "base")

    def rank(comm: Comm) -> dict[str, torch.Tensor]:
        config = peft.LoraConfig(**LORA)
        loaded = sw.hf.load(folder, lora=config, comm=comm, ignored=ignored)
        sharded = loaded.sharded
        names = {n for n, _ in loaded.model.named_parameters(remove_duplicate=False)}
        assert on_meta(sharded).keys() == names
        save_adapter(sharded, tmp_path / "adapter")
        load_adapter(sharded, tmp_path / "adapter")
        whole = sharded.state_dict()
        stored = stored_names(sharded, "default")
        return {in_peft: whole[in_whole] for in_whole, in_peft in stored.items()}

    first, second = run_threads(2, rank)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(same(values, first) for values in (second, written))
    plain = peft.PeftModel.from_pretrained(_base(folder), tmp_path / "adapter")
    assert same(get_peft_model_state_dict(plain), first)


def test_the_configuration_is_the_one_that_peft_writes(tmp_path: Path) -> None:
    model: Any = peft.get_peft_model(
        _base(tiny("llama", tmp_path / "base")), peft.LoraConfig(**LORA)
    )
    model.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert json.loads(config_text(model, model.peft_config["default"])) == written
    assert not model.peft_config["default"].inference_mode


def _base(folder: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder)
