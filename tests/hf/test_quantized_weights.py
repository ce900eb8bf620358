"""``sw.hf.load(quantization=…)``: the bits of a whole weight, of which each rank reads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.hf.adapters import save_adapter
from shardwise.hf.preparation import prepare
from shardwise.hf.quantized import quantize
from tests.copies import equal, error_text
from tests.hf.folders import tiny
from tests.hf.quantising import quantising_one_at_a_time
from tests.nets import tokens
from tests.ranks import run_threads

pytest.importorskip("bitsandbytes")
one_at_a_time = quantising_one_at_a_time
pytestmark = [
    pytest.mark.usefixtures("one_at_a_time"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def bits(**options: Any) -> Any:
    return hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **options)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_quantised_as_its_whole_weights_are(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """GPT-2's matrices are transposed; of Mixtral all but the converted experts are quantised."""
    folder = tiny(architecture, tmp_path)
    loader: Any = hf.AutoModelForCausalLM
    loader.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    whole = loader.from_pretrained(folder)
    table = quantize(whole, bits())
    prepare(whole)

    def rank(comm: Comm) -> str:
        loaded = sw.hf.load(folder, comm=comm, quantization=bits())
        assert equal(loaded.sharded.state_dict(), whole.state_dict())
        assert not any(param.requires_grad for param in loaded.model.parameters())
        return str(loaded)

    for text in run_threads(2, rank):
        assert str(table) in text
        assert f" {loader.from_config(whole.config).num_parameters():,} parameters in " in text


def test_an_adapter_on_it_is_trained_and_answers_in_peft(tmp_path: Path) -> None:
    folder, ids = tiny("llama", tmp_path / "base"), tokens(1, (2, 7), 61)
    lora = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    whole: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    quantize(whole, bits())
    prepare(whole)
    linears = sum(param.numel() for param in plain_linears(folder))

    def rank(comm: Comm) -> tuple[torch.Tensor, str]:
        loaded = sw.hf.load(folder, comm=comm, quantization=bits(), lora=lora)
        trained = [param for param in loaded.model.parameters() if param.requires_grad]
        loaded.model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(trained, lr=1.0).step()
        save_adapter(loaded.sharded, tmp_path / "adapter")
        return loaded.model(input_ids=ids).logits.detach().clone(), str(loaded)

    (logits, text), (same, _) = run_threads(2, rank)
    plain = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert torch.equal(plain(input_ids=ids).logits, logits)
    assert torch.equal(logits, same)
    adapter = sum(p.numel() for n, p in plain.named_parameters() if "lora_" in n)
    others = sum(p.numel() for n, p in whole.named_parameters() if p.is_floating_point())
    assert f"{adapter:,}" in text.splitlines()[-1]
    assert f"{linears + others:,}" in text.splitlines()[-1]  # values, and not their bytes
    dora = peft.LoraConfig(r=3, use_dora=True, target_modules="all-linear")
    refused = error_text(sw.ConfigError, lambda: sw.hf.load(folder, quantization=bits(), lora=dora))
    assert "sharded bytes" in refused


def plain_linears(folder: Path) -> list[torch.Tensor]:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    named = model.model.named_modules()
    return [m.weight for _, m in named if isinstance(m, torch.nn.Linear)]
