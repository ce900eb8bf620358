"""The subject of ``shardwise plan``: a model, its inputs, and what a recipe has decided."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.cli.models import named_model
from shardwise.errors import ConfigError
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.forecast.observe import counted
from shardwise.plan.forecast.question import Inputs, Question
from shardwise.recipe.read import parse, read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import path_of, shipped

LENGTH = 2048  # tokens of a row where nothing says how long it is
QUANTIZED = {
    "nf4": {"bits": 4, "type": "nf4"},
    "fp4": {"bits": 4, "type": "fp4"},
    "int8": {"bits": 8},
}


class Planned(NamedTuple):
    """A model to plan for.

    Attributes:
        question: about it; its rows are those of a recipe.
        length: tokens of a row.
        chosen: what a recipe has decided.
        recipe: keys by which `shardwise train` trains it; ``None``: a recipe cannot name it.
    """

    question: Question
    length: int
    chosen: Candidate | None = None
    recipe: dict[str, Any] | None = None


def planned(
    name: str,
    machine: Machine,
    ranks: int,
    *,
    length: int | None = None,
    lora: int | None = None,
    quantize: str | None = None,
) -> Planned:
    """The model of this name: a recipe, a ``config.json`` or its folder, a hub's, a function's.

    Args:
        machine, ranks: that are asked about.
        length: of a row, in place of a recipe's.
        lora, quantize: the rank of adapters, and how the base is quantised: a key of ``QUANTIZED``.

    Raises:
        ConfigError: there is none, or it cannot be changed so.
    """
    if name.endswith((".yaml", ".yml", ".toml")) or name in shipped():
        _refuse_changes(name, lora, quantize)
        return of_recipe(name, machine, ranks, {"data.context": length} if length else {})
    path = Path(name)
    if path.name == "config.json" or (path / "config.json").is_file() or _is_of_a_hub(name):
        source = str(path.parent if path.is_file() else name)
        return _of_transformers(_keys(source, lora, quantize), machine, ranks, length)
    _refuse_changes(name, lora, quantize)
    named = named_model(name)
    if named.inputs is None:
        raise ConfigError(
            f"{name} gave a model without an input, so what it computes is not known. Return both: "
            "return model, torch.zeros(1, 2048, dtype=torch.int64)."
        )
    if length is not None:
        raise ConfigError(
            f"--seq {length} is for models that shardwise makes inputs for, and {name} returns its "
            "own. Return a longer or a shorter one, and leave --seq out."
        )
    question = Question(named.model, lambda rows: _with_rows(named.inputs, rows), machine, ranks)
    args, kwargs = _with_rows(named.inputs, 1)
    batch = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return Planned(question, counted(batch)["tokens"])


def _is_of_a_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _refuse_changes(name: str, lora: int | None, quantize: str | None) -> None:
    if lora or quantize:
        raise ConfigError(
            f"--lora and --quantize are for models of transformers, and {name} is another. In a "
            "recipe set adapter.rank and model.quantization.bits."
        )


def of_recipe(path: str, machine: Machine, ranks: int, changed: Mapping[str, int]) -> Planned:
    """The recipe with ``changed`` keys. Raises ``ConfigError``: they do not go together."""
    from shardwise.train.question import chosen_by, model_of, question_of

    recipe = read_recipe(path, [f"--{key}={value}" for key, value in changed.items()])
    keys, _ = parse(path_of(path))
    question = question_of(recipe, model_of(recipe), machine, ranks)
    return Planned(question, recipe.data.context, chosen_by(recipe), keys)


def _of_transformers(
    keys: dict[str, Any], machine: Machine, ranks: int, length: int | None
) -> Planned:
    from shardwise.train.model_folder import longest_row
    from shardwise.train.question import model_of, question_of

    model: Any = model_of(Recipe.model_validate(keys))
    keys["data"] = {"context": length or min(longest_row(model.config) or LENGTH, LENGTH)}
    question = question_of(Recipe.model_validate(keys), model, machine, ranks)
    return Planned(replace(question, rows=None), keys["data"]["context"], None, keys)


def _keys(source: str, lora: int | None, quantize: str | None) -> dict[str, Any]:
    """Return a recipe's keys: computed in bfloat16, and what is trained whole, stored wide."""
    if quantize and not lora:
        raise ConfigError(
            f"--quantize {quantize} is for a base that is not trained. Add --lora r=16."
        )
    precision = {"param_dtype": "bfloat16"} | ({} if lora else {"stored_dtype": "float32"})
    model: dict[str, Any] = {"from": source, "dtype": "bfloat16"}
    if quantize:
        model["quantization"] = QUANTIZED[quantize]
    adapter = {"adapter": {"rank": lora}} if lora else {}
    return {"model": model, **adapter, "sharding": {"precision": precision}}


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
