"""The config files with which `transformers` loads the folder of a trained model.

Names and shapes are Llama's, so the weights need no conversion.
"""

from __future__ import annotations

import json

import torch

from shardwise.config.precision import dtype_name
from shardwise.recipe.model_config import ModelConfig
from shardwise.train import model_folder
from shardwise.train.data import Data
from shardwise.train.job import Job
from shardwise.train.tokenizer import end_id, transformers_config

WEIGHTS = "model.safetensors"


def config_texts(job: Job, data: Data) -> dict[str, bytes]:
    """The config files by name, without ``tokenizer.json``; of ``model.from``, all of them."""
    recipe, tokenizer = job.recipe, data.tokenizer
    dtype = next(job.model.parameters()).dtype
    if recipe.model.source is not None:
        return model_folder.files(recipe, dtype)
    size, end = tokenizer.get_vocab_size(), end_id(tokenizer, recipe.tokenizer.end)
    files = config_files(recipe.model, size, recipe.data.context, end, dtype)
    files["tokenizer_config.json"] = transformers_config(recipe.data.context, recipe.tokenizer.end)
    return {name: json.dumps(value, indent=2).encode() for name, value in files.items()}


def config_files(
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
        # transformers 5 reads rope_parameters, older versions the two keys below
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype_name(dtype),
    }
