"""The section ``adapter`` of a recipe: what peft gets, and what has no effect."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.recipe.adapter_config import AdapterConfig
from shardwise.recipe.recipe import Recipe


def test_each_key_reaches_peft() -> None:
    config = AdapterConfig(
        rank=4,
        alpha=32,
        dropout=0.05,
        bias="lora_only",
        targets=("q_proj", "v_proj"),
        rslora=True,
        dora=True,
        modules_to_save=("lm_head",),
        init="orthogonal",
    ).config()
    assert config is not None
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (
        4,
        32,
        0.05,
        "lora_only",
    )
    assert set(config.target_modules or ()) == {"q_proj", "v_proj"}
    assert (config.use_rslora, config.use_dora, config.init_lora_weights) == (
        True,
        True,
        "orthogonal",
    )
    assert (config.modules_to_save, config.task_type) == (["lm_head"], "CAUSAL_LM")


def test_by_default_there_is_none_and_with_a_rank_every_linear_layer_has_one() -> None:
    assert AdapterConfig().config() is None
    config = AdapterConfig(rank=8).config()
    assert config is not None
    assert (config.target_modules, config.init_lora_weights) == ("all-linear", True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alpha": 32}, "rank is null, so there is no adapter, and alpha has no effect"),
        ({"new_tokens": ["<tool>"]}, "there is no adapter, and new_tokens has no effect"),
        ({"rank": 0}, "greater than 0"),
        ({"rank": 4, "dropout": 1}, "less than 1"),
        ({"rank": 4, "init": "pissa"}, "'default', 'gaussian' or 'orthogonal'"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AdapterConfig(**keys)


@pytest.mark.parametrize("trained", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_parts_of_the_base_that_are_trained_compute_as_what_is_frozen(
    trained: dict[str, Any],
) -> None:
    """Stored in bfloat16, they did so in float32's place, and the first step ended in an error."""
    precision = {"stored_dtype": "bfloat16"}
    recipe = {"model": {"from": "x"}, "adapter": {"rank": 4, **trained}}
    with pytest.raises(ValidationError, match=f"adapter.{next(iter(trained))} trains parts of"):
        Recipe.model_validate(recipe | {"sharding": {"precision": precision}})
    precision["param_dtype"] = "bfloat16"
    Recipe.model_validate(recipe | {"sharding": {"precision": precision}})
