"""What does not fit in a recipe, told without a word of the library that found it."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from shardwise.recipe.errors import ValueOrigins, error_messages
from shardwise.recipe.recipe import Recipe

WHERE = ValueOrigins("r.yaml", {}, {})


def messages(text: str, where: ValueOrigins = WHERE) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(yaml.safe_load(text))
    return list(error_messages(caught.value, where))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1]", "model is [1]; it must be a table of keys, such as width, layers, heads."),
        ("optimizer: {betas: 0.9}", "optimizer.betas is 0.9; it must be a list like [0.9, 0.95]."),
        ("optimizer: {betas: [1, 2, 3]}", "it must be a list like [0.9, 0.95]."),
        ("optimizer: {lr: .inf}", "optimizer.lr is inf; it must be a finite number."),
        ("optimizer: {lr: fast}", "optimizer.lr is 'fast'; it must be a number."),
        ("1: 2", "r.yaml: 1: there is no such key."),
        ("run: {steps: 2.5}", "run.steps is 2.5; it must be a whole number."),
        ("run: {steps: }", "run.steps is empty; it must be a whole number."),
        ("run: {overwrite: 3}", "run.overwrite is 3; it must be true or false."),
        ("run: {folder: 3}", "run.folder is 3; it must be text; put it in quotes."),
        ("sample: {prompt: ''}", "sample.prompt is ''; it must not be empty."),
        ("data: {validation: 2}", "data.validation is 2; it must be less than 1."),
        ("data: {context: 1}", "data.context is 1; it must be at least 2."),
        ("sharding: {bucketing: x}", "it must be 'block', 'layer' or 'none'."),
        ("sharding: {wrap: {a: 1}}", "sharding.wrap is {'a': 1}; expected units: auto, module "),
        (
            "sharding: {precision: 3}",
            "it must be a table of keys, such as stored_dtype, param_dtype, reduce_dtype.",
        ),
    ],
)
def test_each_kind_of_mistake_has_its_sentence(text: str, message: str) -> None:
    (line,) = messages(text)
    assert message in line
    for word in ("pydantic", "Config", "instance", "tuple", "Input", "valid "):
        assert word not in line


def test_a_value_is_blamed_on_its_line_or_on_its_override() -> None:
    lines = {("model",): 1, ("model", "width"): 2}
    text = "model: {width: x}"
    assert messages(text, ValueOrigins("r.yaml", lines, {}))[0].startswith(
        "r.yaml:2: model.width is 'x'"
    )
    overridden = ValueOrigins("r.yaml", lines, {"model.width": "x"})
    assert messages(text, overridden)[0].startswith("override --model.width is 'x'")
