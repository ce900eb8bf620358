"""The subject of ``shardwise plan``: a model, its inputs, and what a recipe has decided."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.cli.models import named_model
from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.observe import loss_of
from shardwise.plan.forecast.search import Inputs
from shardwise.recipe.adapter_config import AdapterConfig
from shardwise.recipe.quantization_config import QuantizationConfig
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import shipped

BY_CANDIDATES = ("strategy", "mesh", "unsharded", "activation_checkpointing", "offload", "prefetch")
LENGTH = 2048  # tokens of a row where nothing says how long it is


@dataclass(frozen=True)
class Planned:
    """A model to plan for.

    Attributes:
        model: on the meta device, or as the user's function made it.
        inputs: rows → arguments of its forward.
        length: tokens of a row.
        loss: of what it returns.
        rows: of a step over all ranks, if a recipe says so.
        chosen: what a recipe has decided.
        optimizer, arguments: as in ``Question``.
    """

    model: nn.Module
    inputs: Callable[[int], Inputs]
    length: int
    loss: Callable[[Any], Tensor] = loss_of
    rows: int | None = None
    chosen: Candidate | None = None
    optimizer: str = "adamw"
    arguments: Mapping[str, Any] = field(default_factory=dict)


def planned(name: str, length: int | None, lora: int | None, quantize: str | None) -> Planned:
    """The model of this name: a recipe, a ``config.json`` or its folder, a hub's, a function's.

    Raises:
        ConfigError: there is none, or it cannot be changed so.
    """
    if name.endswith((".yaml", ".yml", ".toml")) or name in shipped():
        _refuse_changes(name, lora, quantize)
        return _of_recipe(name, length)
    path = Path(name)
    if path.name == "config.json" or (path / "config.json").is_file() or _is_of_a_hub(name):
        return _of_transformers(
            str(path.parent if path.is_file() else name), length, lora, quantize
        )
    _refuse_changes(name, lora, quantize)
    found = named_model(name)
    if found.inputs is None:
        raise ConfigError(
            f"{name} gave a model without an input, so what it computes is not known. Return both: "
            "return model, torch.zeros(1, 2048, dtype=torch.int64)."
        )
    return Planned(found.model, lambda rows: _with_rows(found.inputs, rows), length or LENGTH)


def _is_of_a_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _refuse_changes(name: str, lora: int | None, quantize: str | None) -> None:
    if lora or quantize:
        raise ConfigError(
            f"--lora and --quantize are for models of transformers, and {name} is another. In a "
            "recipe set adapter.rank and model.quantization.bits."
        )


def _of_recipe(path: str, length: int | None) -> Planned:
    from shardwise.recipe.read import read_recipe
    from shardwise.recipe.shard_arguments import shard_arguments
    from shardwise.train.decoder import Decoder
    from shardwise.train.model_folder import on_meta

    recipe = read_recipe(path, (), ())
    length = length or recipe.data.context
    if recipe.model.source is None:
        with torch.device("meta"):
            model: nn.Module = Decoder(recipe.model, recipe.tokenizer.vocabulary, length)
    else:
        model = _causal(on_meta(recipe))
    arguments = shard_arguments(recipe.sharding)
    return Planned(
        model,
        lambda rows: ((torch.zeros(rows, length, dtype=torch.int64),), _options(model)),
        length,
        cross_entropy,
        recipe.batch.rows,
        _chosen(recipe),
        recipe.optimizer.name.removeprefix("paged_"),
        {key: value for key, value in arguments.items() if key not in BY_CANDIDATES},
    )


def _chosen(recipe: Recipe) -> Candidate:
    sharding = recipe.sharding
    return Candidate(
        sharding.strategy,
        recipe.batch.micro,
        sharding.mesh,
        int(bool(sharding.activation_checkpointing)),
        sharding.offload,
    )


def _of_transformers(
    source: str, length: int | None, lora: int | None, quantize: str | None
) -> Planned:
    from shardwise import hf

    quantization = QuantizationConfig(**_bits(quantize)).config()
    adapter = AdapterConfig(rank=lora).config()
    model = _causal(hf.on_meta(source, None, torch.bfloat16, hf.Changes(quantization, adapter)))
    longest = getattr(model.config, "max_position_embeddings", None) or LENGTH
    length = length or min(longest, LENGTH)
    stored = None if lora else torch.float32
    precision = Precision(param_dtype=torch.bfloat16, stored_dtype=stored)
    return Planned(
        model,
        lambda rows: ((torch.zeros(rows, length, dtype=torch.int64),), _options(model)),
        length,
        cross_entropy,
        arguments={"precision": precision},
    )


def _bits(quantize: str | None) -> dict[str, Any]:
    if quantize is None:
        return {}
    known: dict[str, dict[str, Any]] = {
        "nf4": {"bits": 4, "type": "nf4"},
        "fp4": {"bits": 4, "type": "fp4"},
        "int8": {"bits": 8},
    }
    return known[quantize]


def _causal(model: Any) -> Any:
    from shardwise.hf.causal_attention import make_causal

    make_causal(model)
    return model


def _options(model: nn.Module) -> dict[str, Any]:
    """Return options of models of transformers for what training does not use."""
    return {"use_cache": False} if hasattr(model, "config") else {}


def cross_entropy(output: Any) -> Tensor:
    """The loss of a causal language model, all places labelled, as the trainer computes it."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    every = logits.float().flatten(0, 1)
    targets = torch.zeros(every.shape[0], dtype=torch.int64, device=every.device)
    return F.cross_entropy(every, targets, reduction="sum")


def _with_rows(inputs: Any, rows: int) -> Inputs:
    """The example's tensors with so many rows."""
    if isinstance(inputs, Mapping):
        return (), {key: _rows_of(value, rows) for key, value in inputs.items()}
    each = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(_rows_of(value, rows) for value in each), {}


def _rows_of(value: Any, rows: int) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value.new_empty((rows, *value.shape[1:]), device="meta")
    return value
