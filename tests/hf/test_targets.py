"""The match table: what a target names in each model, and what is said where it names nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from shardwise.errors import ConfigError
from shardwise.hf.targets import match_targets, trainable_line
from tests.hf import folders

pytestmark = [  # peft asks transformers for what this one has renamed, and tells what it sets
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = folders.SHAPE | {"vocab_size": 61, **SPECIAL}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))


def gpt2() -> nn.Module:
    shape: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, bos_token_id=1, eos_token_id=2))


def phi3() -> nn.Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def counts(build: Callable[[], nn.Module], **options: Any) -> dict[str, int]:
    matches = match_targets(peft.LoraConfig(**options), on_meta(build))
    return {row.target: len(row.paths) for row in matches.rows}


def refused(build: Callable[[], nn.Module], **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        counts(build, **options)
    return str(raised.value)


def test_each_target_has_a_row() -> None:
    config = peft.LoraConfig(target_modules=["v_proj", "lm_head"], modules_to_save=["embed_tokens"])
    assert str(match_targets(config, on_meta(llama))).splitlines() == [
        "target        modules  where",
        "lm_head             1  lm_head",
        "v_proj              2  model.layers.*.self_attn.v_proj",
        "embed_tokens        1  model.embed_tokens (trained whole)",
    ]


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "names": (llama, {"target_modules": ["q_proj", "down_proj"]}),
    "one name, twice in a layer": (gpt2, {"target_modules": ["c_proj"]}),
    "a regular expression": (llama, {"target_modules": r".*\.mlp\..*_proj"}),
    "every linear layer": (llama, {"target_modules": "all-linear"}),
    "the defaults of peft": (llama, {}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "all but one": (
        llama,
        {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    ),
}


@pytest.mark.parametrize(("build", "options"), CASES.values(), ids=CASES)
def test_it_matches_what_peft_adapts(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    config = peft.LoraConfig(**options)
    rows = match_targets(config, on_meta(build)).rows
    adapted: Any = peft.get_peft_model(on_meta(build), config)
    expected = adapted.base_model.targeted_module_names
    assert sorted(path for row in rows for path in row.paths) == sorted(expected)


def test_fused_experts_are_what_peft_makes_of_them() -> None:
    experts = {"target_modules": ["q_proj", "w1", "w2", "w3"]}
    assert counts(mixtral, **experts) == {"q_proj": 2, "down_proj": 2, "gate_up_proj": 2}


@pytest.mark.parametrize(
    ("build", "target", "instead"),
    [
        (llama, "w1", "w1: 0 modules (this model calls it gate_proj)"),
        (llama, "w2", "w2: 0 modules (this model calls it down_proj)"),
        (llama, "w3", "w3: 0 modules (this model calls it up_proj)"),
        (llama, "c_attn", "c_attn: 0 modules (this model calls it q_proj, k_proj, v_proj)"),
        (gpt2, "q_proj", "q_proj: 0 modules (this model calls it c_attn)"),
        (phi3, "up_proj", "up_proj: 0 modules (this model calls it gate_up_proj)"),
        (llama, "wte", "wte: 0 modules (this model calls it embed_tokens)"),
        (llama, "q_prj", "q_prj: 0 modules (nearest: q_proj, k_proj, o_proj)"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_this_models_name(
    build: Callable[[], nn.Module], target: str, instead: str
) -> None:
    other = "c_proj" if build is gpt2 else "o_proj"  # which alone would train, and peft is silent
    text = refused(build, target_modules=[other, target])
    assert instead in text
    assert f"{other}: 0" not in text


def test_layers_that_are_not_there_are_named_and_not_the_module_that_is() -> None:
    text = refused(llama, target_modules=["q_proj"], layers_to_transform=[2])
    assert "q_proj: 0 modules (elsewhere: see layers_to_transform, " in text


def test_a_module_to_save_that_is_not_there_is_refused() -> None:
    text = refused(llama, target_modules=["q_proj"], modules_to_save=["score"])
    assert "score: 0 modules" in text


def test_a_model_without_defaults_needs_targets() -> None:
    assert "no targets" in refused(lambda: nn.Sequential(nn.Linear(2, 2)))


def test_a_target_of_some_layers_is_a_warning_unless_they_were_chosen() -> None:
    def warned(**options: Any) -> list[str]:
        return match_targets(peft.LoraConfig(**options), on_meta(llama)).warnings

    (text,) = warned(target_modules=r".*layers\.0\..*q_proj")
    assert "matches only some layers (1 of 2 in model.layers)" in text
    assert warned(target_modules=["q_proj"]) == []
    assert warned(target_modules=["q_proj"], layers_to_transform=[1]) == []
    assert warned(target_modules=["model.layers.0.self_attn.q_proj"]) == []


def test_the_line_is_that_of_peft(capsys: pytest.CaptureFixture[str]) -> None:
    adapted: Any = peft.get_peft_model(on_meta(llama), peft.LoraConfig())
    adapted.print_trainable_parameters()
    assert capsys.readouterr().out.strip() == trainable_line(*adapted.get_nb_trainable_parameters())
