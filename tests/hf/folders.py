"""Folders as the hub has them, tiny: a config, random weights, a tokenizer with a chat template.

``save_pretrained`` writes them, so a model that is converted when it is loaded has the hub's
layout: Mixtral's experts are a tensor each.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer

from shardwise.train import tokenizer as bpe
from tests.train.tiny import documents

Options = dict[str, Any]

VOCABULARY = 320
END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
HEADS_OF_8: Options = {"head_dim": 8}
EXPERTS: Options = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
ARCHITECTURES: dict[str, Options] = {
    "llama": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": HEADS_OF_8,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": HEADS_OF_8 | EXPERTS,
    "olmoe": EXPERTS,
    "gpt_oss": HEADS_OF_8 | EXPERTS | {"rope_parameters": {"rope_type": "default"}},
    "gemma2": HEADS_OF_8,
    "gemma3_text": HEADS_OF_8,
    "phi": {},
    "phi3": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "opt": {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "olmo2": {},
    "granite": {},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "cohere": {},
    "smollm3": {},
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "mamba": {"state_size": 4},
    "glm4": HEADS_OF_8,
    "helium": HEADS_OF_8,
    "nemotron": {},
    "ernie4_5": HEADS_OF_8,
}
"""By transformers' name of the model's type: what its config has beside ``SHAPE``."""


def tiny(architecture: str, folder: Path, **options: Any) -> Path:
    """Write a folder of one of ``ARCHITECTURES``; ``options`` are of its config. Returns it."""
    tokenizer = tiny_tokenizer()
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    shape = {**SHAPE, **special, **ARCHITECTURES[architecture], **options}
    config = hf.AutoConfig.for_model(architecture, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # no norm's scale is 1, and no bias 0
            for value in (*model.parameters(), *persistent_buffers(model)):
                value.add_(torch.randn_like(value) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def persistent_buffers(model: hf.PreTrainedModel) -> list[torch.Tensor]:
    """The buffers that are stored, if floating-point."""
    others = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = model.named_buffers()
    return [value for name, value in buffers if name not in others and value.is_floating_point()]


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer of 300 tokens; its end token is that of a turn, its padding is another one."""
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def _trained() -> str:
    return bpe.train(documents(), 298)
