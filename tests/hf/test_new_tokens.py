"""Tokens that a vocabulary lacks: their embeddings are trained, saved and used without us."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.comm.protocol import Comm
from shardwise.hf.adapters import save_adapter
from shardwise.hf.merge import merged_weights
from tests.copies import error_text
from tests.hf.folders import END, VOCABULARY, tiny
from tests.ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NEW = [f"<tool {number}>" for number in range(21)]
"""The tiny vocabulary has room for 20 tokens."""


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM")


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids).logits
    return out.clone()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [2, 21], ids=["in room that there is", "in rows of their own"])
def test_they_are_trained_and_their_adapter_is_pefts(
    count: int, tied: bool, tmp_path: Path
) -> None:
    folder = tiny("llama", tmp_path / "base", tie_word_embeddings=tied)

    def rank(comm: Comm) -> tuple[Tensor, Tensor, int]:
        loaded = sw.hf.load(folder, lora=lora(), new_tokens=NEW[:count], comm=comm)
        batch = torch.tensor([loaded.tokenizer.encode("a" + "b".join(NEW[:count]))])
        before = logits(loaded.model, batch)
        params = [param for param in loaded.model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(params, lr=1.0)
        loaded.model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        save_adapter(loaded.sharded, tmp_path / "adapter")
        assert before.isfinite().all()
        return batch, logits(loaded.model, batch), len(loaded.tokenizer)

    (batch, expected, length), other = run_threads(2, rank)
    assert torch.equal(expected, other[1])
    assert batch.max() == 299 + count
    base: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    if length > VOCABULARY:
        base.resize_token_embeddings(length)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, batch), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_they_are_trained_in_the_dtype_of_the_model(
    strategy: str, tied: bool, tmp_path: Path
) -> None:
    """peft reads the table beside its unit: there it was float32, or its new rows were."""
    folder = tiny("llama", tmp_path / "base", tie_word_embeddings=tied)
    half = sw.Precision(param_dtype=torch.bfloat16)

    def rank(comm: Comm) -> None:
        options: Any = {"strategy": strategy, "precision": half, "activation_checkpointing": True}
        loaded = sw.hf.load(folder, lora=lora(), new_tokens=NEW[:2], comm=comm, **options)
        embedded: list[torch.dtype] = []
        table = loaded.model.get_input_embeddings()
        table.register_forward_hook(lambda _module, _args, out: embedded.append(out.dtype))
        batch = torch.tensor([[300, 301, 5, 300]])
        loaded.model(input_ids=batch, labels=batch).loss.backward()
        assert embedded == [torch.bfloat16]

    run_threads(2, rank)


def test_what_is_no_new_token_is_refused(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    load = partial(sw.hf.load, folder, lora=lora(), new_tokens=[END])
    assert f"{END!r} cannot be added to the tokenizer: it has it" in error_text(
        sw.ConfigError, load
    )
    load = partial(sw.hf.load, folder, lora=lora(), new_tokens=[""])  # peft would train every row
    assert "new token '' cannot be added to the tokenizer: it is empty." in error_text(
        sw.ConfigError, load
    )
    without = partial(sw.hf.load, folder, new_tokens=NEW[:1])
    assert "<tool 0>, and lora is None: an adapter trains" in error_text(sw.ConfigError, without)
    own = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    both = partial(sw.hf.load, folder, lora=own, new_tokens=NEW[:1])
    assert "indices=[3] are those of lora, and new_tokens (<tool 0>)" in error_text(
        sw.ConfigError, both
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_a_table_that_the_adapter_trains_in_another_way_is_refused_on_every_rank(
    key: str, name: str, tied: bool, tmp_path: Path
) -> None:
    """peft refused it in words of its own; or not before the first step, where both are tied."""
    folder = tiny("llama", tmp_path, tie_word_embeddings=tied)
    names: Any = {"target_modules": ["q_proj"]} | {key: ["up_proj", name]}
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", **names)

    def rank(comm: Comm) -> str:
        load = partial(sw.hf.load, folder, lora=config, new_tokens=NEW[:1], comm=comm)
        return error_text(sw.ConfigError, load)

    for text in run_threads(2, rank):
        assert f"Leave {name!r} out of {key}" in text


def test_one_that_is_named_twice_has_one_row(tmp_path: Path) -> None:
    loaded = sw.hf.load(tiny("llama", tmp_path), lora=lora(), new_tokens=NEW[:1] * 2)
    assert loaded.model.peft_config["default"].trainable_token_indices["embed_tokens"] == [300]


def test_rows_that_the_base_lacks_are_not_merged(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "base")
    save_adapter(sw.hf.load(folder, lora=lora(), new_tokens=NEW).sharded, tmp_path / "adapter")
    with CheckpointReader.open(folder) as source:
        text = error_text(sw.CheckpointError, lambda: merged_weights(source, tmp_path / "adapter"))
    assert "trains token 320, and the base has rows for 320" in text
