"""Twelve ``transformers`` architectures train to parity, unmodified, with ``sw.shard(model)``.

Parity is form (a): bit for bit. Among them are tied and fused weights, experts, encoder–decoders,
vision, speech, two towers with a contrastive loss, and a state-space model that reads its layers'
weights without calling the layers.

Configs are tiny and random, dropout is off (its generator would be the threads' common one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.nets import numbers, tokens
from tests.parity.plain import OPTIMIZERS, Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.ranks import run_threads
from tests.steps import STRATEGIES

Options = dict[str, Any]

VOCABULARY = 61
EAGER: Options = {"attn_implementation": "eager"}
SPECIAL: Options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    **SPECIAL,
    **EAGER,
}
GROUPED: Options = {**SHAPE, "num_key_value_heads": 2}
HEADS_OF_8: Options = {**GROUPED, "head_dim": 8}
NO_DROPOUT: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOWER: Options = {key: SHAPE[key] for key in list(SHAPE)[1:5]}
PICTURE: Options = {"image_size": 8, "patch_size": 4, "num_channels": 3}


# --- models ----------------------------------------------------------------------------------


def llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))


def gpt2() -> hf.PreTrainedModel:
    off: Options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape: Options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = hf.GPT2Config(vocab_size=VOCABULARY, **shape, **off, **SPECIAL, **EAGER)
    return hf.GPT2LMHeadModel(config)


def qwen3() -> hf.PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**HEADS_OF_8))


def mixtral() -> hf.PreTrainedModel:
    experts: Options = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    }
    return hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, **experts))


def gemma2() -> hf.PreTrainedModel:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**HEADS_OF_8))


def phi() -> hf.PreTrainedModel:
    return hf.PhiForCausalLM(hf.PhiConfig(**SHAPE))


def mamba() -> hf.PreTrainedModel:
    shape: Options = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCABULARY, **shape))


def bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **NO_DROPOUT))


def t5() -> hf.PreTrainedModel:
    shape: Options = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    start: Options = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    config = hf.T5Config(vocab_size=VOCABULARY, **shape, **start, **EAGER)
    return hf.T5ForConditionalGeneration(config)


def vit() -> hf.PreTrainedModel:
    labels: Options = {"num_labels": 5}
    config = hf.ViTConfig(**TOWER, **PICTURE, **NO_DROPOUT, **EAGER, **labels)
    return hf.ViTForImageClassification(config)


def whisper() -> hf.PreTrainedModel:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=6,
        max_target_positions=16,
        decoder_start_token_id=1,
        dropout=0.0,
        **SPECIAL,
        **EAGER,
    )
    return hf.WhisperForConditionalGeneration(config)


def clip() -> hf.PreTrainedModel:
    text: Options = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16, **SPECIAL}
    config = hf.CLIPConfig(
        text_config=text, vision_config={**TOWER, **PICTURE}, projection_dim=16, **EAGER
    )
    return hf.CLIPModel(config)


# --- what they are fed -----------------------------------------------------------------------

Inputs = dict[str, Any]


def words(seed: int, rows: int, length: int = 8) -> Tensor:
    """The tokens but the special ones, which end or mask a text."""
    return tokens(seed, (rows, length), VOCABULARY - 3) + 3


def text(seed: int, rows: int) -> Inputs:
    ids = words(seed, rows)
    return {"input_ids": ids, "labels": ids}


def masked_text(seed: int, rows: int) -> Inputs:
    return {"input_ids": words(seed, rows), "labels": words(seed + 1, rows)}


def picture(seed: int, rows: int) -> Inputs:
    return {"pixel_values": numbers(seed, (rows, 3, 8, 8)), "labels": tokens(seed + 1, (rows,), 5)}


def speech(seed: int, rows: int) -> Inputs:
    return {"input_features": numbers(seed, (rows, 8, 12)), "labels": words(seed + 1, rows)}


def captioned_picture(seed: int, rows: int) -> Inputs:
    pixels = picture(seed, rows)["pixel_values"]
    return {"pixel_values": pixels, "input_ids": words(seed + 1, rows), "return_loss": True}


def loss(model: nn.Module, inputs: Inputs) -> Tensor:
    value: Tensor = model(**inputs).loss
    return value


@dataclass(frozen=True)
class Architecture:
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Inputs]

    def __str__(self) -> str:
        return self.build.__name__

    def recipe(self, optimizer: str) -> Recipe:
        return Recipe(self.build, self.batch, OPTIMIZERS[optimizer], loss=loss, steps=3)


ARCHITECTURES = [
    *(Architecture(build, text) for build in (llama, gpt2, qwen3, mixtral, gemma2, phi, mamba)),
    Architecture(bert, masked_text),
    Architecture(t5, masked_text),
    Architecture(vit, picture),
    Architecture(whisper, speech),
    Architecture(clip, captioned_picture),
]


# --- parity ----------------------------------------------------------------------------------


OFTEN = ("llama", "mixtral", "t5")  # a decoder, experts, an encoder; all in make prove
MARKED = [
    pytest.param(one, marks=() if str(one) in OFTEN else pytest.mark.prove) for one in ARCHITECTURES
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("architecture", MARKED, ids=str)
def test_it_trains_to_parity_unmodified(architecture: Architecture, optimizer: str) -> None:
    recipe = architecture.recipe(optimizer)
    plain = one_by_one(recipe, 2)
    assert plain.losses[0][0] != plain.losses[0][-1]
    assert_equal(on_threads(2, recipe, How()), plain, "full_shard")


THREE_RANKS = [Architecture(t5, masked_text), Architecture(mixtral, text)]


@pytest.mark.prove
@pytest.mark.parametrize("architecture", THREE_RANKS, ids=str)
def test_it_trains_to_parity_on_three_ranks(architecture: Architecture) -> None:
    recipe, plain = architecture.recipe("sgd"), one_by_one(architecture.recipe("sgd"), 3)
    for strategy in STRATEGIES:
        assert_equal(on_threads(3, recipe, How(strategy)), plain, strategy)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_its_blocks_are_found(architecture: Architecture) -> None:
    """Otherwise everything would be one unit, and parity would prove little."""
    model = architecture.build()
    blocks = {name for name, module in model.named_modules() if name.split(".")[-1] in ("0", "1")}
    units = {unit.name for unit in sw.shard(model).units}
    assert len({name for name in units & blocks if name.count(".") <= 3}) in (2, 4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("build", [llama, t5])
def test_its_own_checkpointing_is_bit_equal_to_the_plain_models(
    build: Callable[[], hf.PreTrainedModel], reentrant: bool
) -> None:
    """The plain model recomputes, too: T5 rounds otherwise then, and reentrant otherwise again."""

    def recomputing() -> nn.Module:
        model = build()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        return model

    recipe = Recipe(recomputing, text, OPTIMIZERS["sgd"], loss=loss, steps=3)
    assert_equal(on_threads(2, recipe, How()), one_by_one(recipe, 2), "full_shard")


@pytest.mark.prove
def test_parts_that_are_called_by_themselves_train_to_parity() -> None:
    """The model itself is never called, though each tower has some of its parameters."""

    def likeness(model: nn.Module, inputs: Inputs) -> Tensor:
        assert isinstance(model, hf.CLIPModel)
        words = model.text_model(inputs["input_ids"]).pooler_output
        pictures = model.vision_model(inputs["pixel_values"]).pooler_output
        value: Tensor = (words - pictures).square().mean()
        return value

    recipe = Recipe(clip, captioned_picture, OPTIMIZERS["adamw"], loss=likeness, steps=3)
    plain = one_by_one(recipe, 2)
    for strategy in STRATEGIES:
        for wrap in (None, sw.wrap.whole()):
            assert_equal(on_threads(2, recipe, How(strategy, wrap)), plain, strategy)


@pytest.mark.parametrize("wrap", [sw.wrap.automatic(), sw.wrap.whole()], ids=str)
def test_an_embedding_the_trunk_and_the_head_are_called_one_after_the_other(
    wrap: sw.wrap.Wrap,
) -> None:
    """A frozen trunk under ``no_grad``, and a head that is trained on what comes out."""

    def by_parts(model: nn.Module, inputs: Inputs) -> Tensor:
        assert isinstance(model, hf.LlamaForCausalLM)
        with torch.no_grad():
            hidden = model.model(inputs_embeds=model.model.embed_tokens(inputs["input_ids"]))
        value: Tensor = model.lm_head(hidden.last_hidden_state).square().mean()
        return value

    recipe = Recipe(llama, text, OPTIMIZERS["adamw"], loss=by_parts, steps=3)
    plain = one_by_one(recipe, 2)
    for strategy in STRATEGIES:
        assert_equal(on_threads(2, recipe, How(strategy, wrap)), plain, strategy)


# --- generation ------------------------------------------------------------------------------

GENERATORS = [llama, gpt2, t5]


@pytest.mark.parametrize("wrap", [sw.wrap.automatic(), sw.wrap.whole()], ids=str)
@pytest.mark.parametrize("build", GENERATORS)
def test_generate_gives_the_plain_models_tokens(
    build: Callable[[], hf.PreTrainedModel], wrap: sw.wrap.Wrap
) -> None:
    plain, models = seeded(build), [seeded(build) for _ in range(2)]
    expected = generated(plain)
    assert len(expected.unique()) > 10, "a model that repeats itself shows nothing"
    for inside, outside in run_threads(2, generated_on_shards, models, wrap):
        assert torch.equal(outside, expected)
        assert torch.equal(inside, expected)


def seeded(build: Callable[[], hf.PreTrainedModel]) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = build()
    for param in model.parameters():  # an initialisation makes all tokens nearly as likely
        nn.init.normal_(param, std=0.5)
    model.eval()
    return model


def generated(model: Any) -> Tensor:
    prompt = words(0, 2, 5)
    greedy = {"max_new_tokens": 10, "do_sample": False, "no_repeat_ngram_size": 1}
    ids: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
    return ids


def generated_on_shards(
    comm: Comm, models: list[hf.PreTrainedModel], wrap: sw.wrap.Wrap
) -> tuple[Tensor, Tensor]:
    """Inside ``full_params()``, and as it is."""
    model = models[comm.rank]
    sharded = sw.shard(model, comm=comm, wrap=wrap)
    outside = generated(model)
    with sharded.full_params():
        inside = generated(model)
    return inside, outside
