"""Every name that does not fit is found, and said, at once."""

from __future__ import annotations

import pytest

from shardwise.checkpoint.load_plan import ModelTensor, match
from shardwise.checkpoint.safetensors_format import Stored


def stored(dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> Stored:
    return Stored(dtype, shape, 0, 0)


def in_model(*names: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 3)) -> ModelTensor:
    return ModelTensor(names, dtype, shape)


def test_what_fits_has_no_problems() -> None:
    plan = match([in_model("a"), in_model("b")], {"b": stored(), "a": stored()}, {})
    assert plan.pairs == {"a": "a", "b": "b"}
    assert plan.problems(cast=False) == []


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    model = [
        in_model("blocks.0.fc.weight"),
        in_model("wide", shape=(4, 4)),
        in_model("ids", dtype="I64"),
        in_model("half", dtype="BF16"),
    ]
    in_files = {"layers.0.fc.weight": stored(), "wide": stored(), "ids": stored(), "half": stored()}
    plan = match(model, in_files, {})
    assert plan.pairs == {"half": "half"}
    assert plan.problems(cast=False) == [
        "blocks.0.fc.weight: not stored; nearest stored is layers.0.fc.weight",
        "layers.0.fc.weight: stored, and the model has no such name",
        "wide: stored as (2, 3), the model has (4, 4)",
        "ids: stored as F32, the model has I64",
        "half: stored as F32, the model has BF16",
    ]
    assert len(plan.problems(cast=True)) == 4
    assert {kind: list(names) for kind, names in plan.misfits.items()} == {
        "missing": ["blocks.0.fc.weight"],
        "unexpected": ["layers.0.fc.weight"],
        "misshapen": ["wide"],
        "foreign": ["ids"],
        "cast": ["half"],
    }


def test_a_tied_weight_may_be_stored_by_any_of_its_names() -> None:
    tied = in_model("embed.weight", "lm_head.weight")
    for name in ("embed.weight", "lm_head.weight"):
        assert match([tied], {name: stored()}, {}).pairs == {"embed.weight": name}


def test_a_tied_weight_that_is_stored_twice_is_no_surprise() -> None:
    tied = in_model("embed.weight", "lm_head.weight")
    plan = match([tied], {"lm_head.weight": stored(), "embed.weight": stored()}, {})
    assert plan.pairs == {"embed.weight": "embed.weight"}
    assert plan.problems(cast=False) == []


def test_weights_that_were_tied_when_saved_load_where_they_are_not() -> None:
    model = [in_model("embed.weight"), in_model("lm_head.weight")]
    plan = match(model, {"embed.weight": stored()}, {"lm_head.weight": "embed.weight"})
    assert plan.pairs == {"embed.weight": "embed.weight", "lm_head.weight": "embed.weight"}
    assert plan.problems(cast=False) == []


@pytest.mark.prove
def test_thousands_of_missing_names_take_little_time() -> None:
    model = [in_model(f"model.layers.{k}.weight") for k in range(5000)]
    in_files = {f"layers.{k}.weight": stored() for k in range(5000)}
    assert len(match(model, in_files, {}).problems(cast=False)) == 10_000
