"""``sw.hf.load``: thirty architectures with no line of code for any of them."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.hf.targets import trainable_line
from tests.copies import equal, error_text
from tests.hf.folders import ARCHITECTURES, CHAT_TEMPLATE, VOCABULARY, tiny
from tests.nets import tokens
from tests.parity.plain import SGD, Recipe, one_by_one
from tests.ranks import run_threads

OFTEN = ("llama", "mixtral", "gpt2", "gemma3_text", "deepseek_v3", "mamba")
"""Plain; experts that are converted; tied, its matrices transposed; a number beside an embedding; a
persistent buffer in fp32; a state-space model."""


def batch(seed: int, rows: int) -> Tensor:
    return tokens(seed, (rows, 8), VOCABULARY)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    value: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return value


def recipe(folder: Path) -> Recipe:
    return Recipe(partial(plain, folder), batch, SGD, loss=loss, steps=3)


def plain(folder: Path) -> Any:
    """The model as transformers loads it, with nothing missing or left over.

    In memory of torch's: that of a file is aligned otherwise, and products round otherwise there.
    """
    loader: Any = hf.AutoModelForCausalLM
    model, info = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return copy.deepcopy(model).train()


def trained(comm: Comm, folder: Path, out: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the whole model after three steps; saves it to ``out``."""
    loaded, run = sw.hf.load(folder, comm=comm), recipe(folder)
    optimizer, losses = SGD(loaded.model.parameters()), list[float]()
    for step in range(run.steps):
        for ids in run.batches(step, comm.rank):
            value = loss(loaded.model, ids)
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    loaded.sharded.save_file(out / "model.safetensors")
    return losses, loaded.model.state_dict()


@pytest.mark.parametrize(
    "world", [2, 3, *(pytest.param(world, marks=pytest.mark.prove) for world in (1, 4, 5))]
)
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in OFTEN else pytest.mark.prove)
        for name in ARCHITECTURES
    ],
)
def test_it_trains_as_in_one_process_and_loads_in_transformers(
    architecture: str, world: int, tmp_path: Path
) -> None:
    folder, out = tiny(architecture, tmp_path / "hub"), tmp_path / "out"
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    expected = one_by_one(recipe(folder), world)
    ranks = run_threads(world, trained, folder, out)
    assert [losses for losses, _ in ranks] == expected.losses
    for (_, state), expected_state in zip(ranks, expected.states, strict=True):
        assert state.keys() == expected_state.keys()
        assert [name for name in state if not torch.equal(state[name], expected_state[name])] == []
    model = one_by_one_model(folder, expected.states[0])
    with torch.no_grad():
        assert torch.equal(plain(out)(batch(0, 2)).logits, model(batch(0, 2)).logits)


def one_by_one_model(folder: Path, state: dict[str, Tensor]) -> Any:
    model = plain(folder)
    model.load_state_dict(state)
    return model


def test_in_another_dtype_it_is_what_transformers_loads(tmp_path: Path) -> None:
    """Which keeps some tensors in fp32, here a buffer of the router."""
    folder = tiny("deepseek_v3", tmp_path)
    loader: Any = hf.AutoModelForCausalLM
    expected = loader.from_pretrained(folder, dtype=torch.bfloat16)

    def rank(comm: Comm) -> None:
        model = sw.hf.load(folder, comm=comm, dtype=torch.bfloat16).model
        assert equal(model.state_dict(), expected.state_dict())
        assert equal(dict(model.named_buffers()), dict(expected.named_buffers()))

    run_threads(3, rank)
    assert {value.dtype for value in expected.state_dict().values()} == {
        torch.bfloat16,
        torch.float32,
    }


def test_settings_of_generation_that_are_damaged_are_refused(tmp_path: Path) -> None:
    (tiny("llama", tmp_path) / "generation_config.json").write_text("{", "utf-8")
    text = error_text(sw.ConfigError, lambda: sw.hf.load(tmp_path))
    assert f"transformers cannot read {tmp_path}/generation_config.json: OSError: It looks" in text
    assert "Mend it, or remove it." in text


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_experts_are_computed_in_float64_too(architecture: str, tmp_path: Path) -> None:
    """Of which torch multiplies no groups."""
    folder, ids = tiny(architecture, tmp_path), batch(0, 2)

    def rank(comm: Comm) -> Tensor:
        model = sw.hf.load(folder, comm=comm, dtype=torch.float64).model
        logits: Tensor = model(input_ids=ids).logits
        logits.sum().backward()
        return logits.detach()

    expected = plain(folder)(input_ids=ids).logits.double()
    for logits in run_threads(2, rank):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_the_folder_s_generation_config_and_tokenizer_come_along(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    hf.GenerationConfig(max_new_tokens=3, eos_token_id=5).save_pretrained(folder)
    loaded = sw.hf.load(folder)
    assert loaded.model.generation_config.max_new_tokens == 3
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.model.training
    assert not loaded.model.config.use_cache
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert sw.hf.load(folder).tokenizer is None


@pytest.mark.parametrize("ignored", ["model.norm", "model.layers.0"])
def test_what_is_left_whole_is_read_too(ignored: str, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)

    def rank(comm: Comm) -> dict[str, Tensor]:
        loaded = sw.hf.load(folder, comm=comm, ignored=[ignored])
        whole = dict(loaded.model.get_submodule(ignored).named_parameters())
        loss(loaded.model, batch(0, 2)).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in whole.values())
        return loaded.sharded.state_dict()

    for states in run_threads(2, rank):
        assert equal(states, plain(folder).state_dict())


def test_it_says_what_was_read(tmp_path: Path) -> None:
    tiny("mixtral", tmp_path)
    text = str(sw.hf.load(tmp_path, dtype=torch.bfloat16))
    assert text == (
        f"MixtralForCausalLM from {tmp_path}: 63,904 parameters in bfloat16, 124.8 KiB on this "
        "rank of 1; use_cache off\n"
        "  read by byte range: 17 tensors\n"
        "  converted: model.layers.0.mlp.experts.gate_up_proj, "
        "model.layers.0.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_up_proj, "
        "model.layers.1.mlp.experts.down_proj\n"
        "  cast: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight and 17 more"
    )


HALVES = {
    "quantization": hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16"),
    "precision": sw.Precision(param_dtype=torch.float16),
}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lora": {}}, "lora is {}, and not a LoraConfig. Pass one, for example peft.LoraConfig(r"),
        (
            {"new_tokens": "<tool>"},
            "new_tokens is '<tool>', and not a list. Pass one: new_tokens=[",
        ),
        ({"dtype": "bf16"}, "dtype is 'bf16', and not a dtype. Pass one, for example torch.bfl"),
        ({"quantization": 4}, "quantization is 4, and not a BitsAndBytesConfig. Pass one, for ex"),
        ({"device_map": "auto"}, "no option 'device_map'; leave it out: ranks hold equal ranges"),
        (HALVES, "training computes in float16, and 4-bit layers in bfloat16"),
        ({"stratgy": "zero1"}, "load() has no option 'stratgy'; nearest is 'strategy'"),
    ],
)
def test_an_argument_of_another_kind_is_answered_with_what_to_pass(
    arguments: dict[str, Any], text: str
) -> None:
    """Before the folder, which does not exist here, is looked for."""
    assert text in error_text(sw.ConfigError, partial(sw.hf.load, "absent/folder", **arguments))


ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LoRA": ("llama", {}, {"target_modules": "all-linear"}),
    "DoRA": ("gpt2", {}, {"target_modules": ["c_attn"], "use_dora": True}),
    "beside experts": ("mixtral", {}, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "tied tokens": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 9]},
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("architecture", "shape", "options"), ADAPTERS.values(), ids=ADAPTERS)
def test_with_an_adapter_it_is_what_peft_makes_of_the_folder(
    architecture: str, shape: Any, options: Any, world: int, tmp_path: Path
) -> None:
    folder = tiny(architecture, tmp_path, **shape)
    lora = peft.LoraConfig(r=3, task_type="CAUSAL_LM", **options)
    base = plain(folder)
    torch.manual_seed(7)
    expected = peft.get_peft_model(base, copy.deepcopy(lora))
    torch.manual_seed(7)

    def rank(comm: Comm) -> tuple[dict[str, Tensor], str]:
        loaded = sw.hf.load(folder, lora=lora, comm=comm)
        return loaded.model.state_dict(), str(loaded)

    for state, text in run_threads(world, rank):
        assert equal(state, expected.state_dict())
        assert text.endswith(trainable_line(*expected.get_nb_trainable_parameters()))
