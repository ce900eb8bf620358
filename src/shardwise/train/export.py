"""A trained model as the folder that `transformers` and everything built on it loads.

Names and shapes are Llama's already, so to export is to write: no conversion, and the saved
tensors are the trained ones bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.checkpoint.disk import written_by_library
from shardwise.checkpoint.one_file import save_safetensors
from shardwise.train.config import ModelConfig
from shardwise.train.folder import Folder
from shardwise.train.tokenizer import transformers_config

__all__ = ["described", "export", "llama_config"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def export(
    folder: Folder, states: Mapping[str, Tensor], config: ModelConfig, context: int, end: int
) -> None:
    """Write weights and configuration beside the tokenizer that is there already.

    Args:
        folder: the run's.
        states: whole CPU tensors under the usual names, as ``model.state_dict()`` gives them.
        config: the decoder's shape.
        context: the longest row.
        end: the end token's id.
    """
    kept = {name: t.contiguous() for name, t in states.items() if name != HEAD or not config.tied}
    place = folder.path / "model.safetensors"
    with folder.replacing(place.name) as path, written_by_library(place, "export"):
        save_safetensors(kept, path)
    embedding = states[EMBEDDING]
    for name, value in described(config, embedding.shape[0], context, end, embedding.dtype).items():
        folder.write_json(name, value)


def described(
    config: ModelConfig, vocabulary: int, context: int, end: int, dtype: torch.dtype
) -> dict[str, dict[str, object]]:
    """The JSON files beside the weights that `transformers` needs, by name."""
    return {
        "config.json": llama_config(config, vocabulary, context, end, dtype),
        "generation_config.json": {
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "do_sample": False,
        },
        "tokenizer_config.json": transformers_config(context),
    }


def llama_config(
    config: ModelConfig, vocabulary: int, context: int, end: int, dtype: torch.dtype
) -> dict[str, object]:
    """The ``config.json`` of a ``LlamaForCausalLM`` of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads rope_parameters, everything older the two keys below it
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": str(dtype).removeprefix("torch."),
    }
