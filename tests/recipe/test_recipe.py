from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from shardwise.comm.machine.accelerators import ROWS
from shardwise.config.prefetch import Prefetch
from shardwise.recipe.model_config import ModelConfig
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.sharding_config import PrecisionConfig, PrefetchConfig


def test_the_defaults_are_a_recipe() -> None:
    assert Recipe().model.head_size == 64


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Recipe().model.width = 3  # type: ignore[misc]


def test_a_number_written_as_text_is_a_number() -> None:
    recipe = Recipe.model_validate({"optimizer": {"lr": "1e-4"}})
    assert recipe.optimizer.lr == 1e-4


@pytest.mark.parametrize("section", [{"run": {"steps": False}}, {"sample": {"prompt": False}}])
def test_a_yaml_no_is_not_taken_for_a_zero_or_a_word(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="YAML reads yes, no"):
        Recipe.model_validate(section)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValidationError, match=r"width 100 over 3 heads .* size 33\.3"):
        ModelConfig(width=100, heads=3, kv_heads=1)


def test_rotary_positions_need_an_even_head() -> None:
    with pytest.raises(ValidationError, match="even whole number"):
        ModelConfig(width=9, heads=3, kv_heads=1)


def test_kv_heads_divide_heads() -> None:
    with pytest.raises(ValidationError, match="4 heads cannot share 3 kv_heads"):
        ModelConfig(heads=4, kv_heads=3)


@pytest.mark.parametrize("betas", [[0.9, 1.0], [-0.1, 0.9]])
def test_betas_are_decay_rates(betas: list[float]) -> None:
    with pytest.raises(ValidationError, match=r"both must lie in \[0, 1\)"):
        Recipe.model_validate({"optimizer": {"betas": betas}})


def test_a_loss_scale_fits_float32() -> None:
    with pytest.raises(ValidationError, match="less than"):
        Recipe.model_validate({"optimizer": {"loss_scale": 1e300}})


def test_a_vocabulary_is_one_that_a_tokenizer_can_have() -> None:
    with pytest.raises(ValidationError, match="less than"):
        Recipe.model_validate({"tokenizer": {"vocabulary": 2**70}})


@pytest.mark.parametrize(
    "tree",
    [{"optimizer": {"schedule": []}}, {"model": {"from": "x", "quantization": {"bits": [4]}}}],
)
def test_a_list_in_a_words_place_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Input should be "):
        Recipe.model_validate(tree)


def test_weights_are_read_as_floating_point_numbers() -> None:
    with pytest.raises(ValidationError, match=r"float32.*bfloat16"):
        Recipe.model_validate({"model": {"from": "x", "dtype": "int8"}})
    assert (
        Recipe.model_validate({"model": {"from": "x", "dtype": "bf16"}}).model.dtype == "bfloat16"
    )


def test_a_tokenizer_that_is_trained_has_no_other_end_token() -> None:
    with pytest.raises(ValidationError, match=r"end is </s> and tokenizer\.source is null"):
        Recipe.model_validate({"tokenizer": {"end": "</s>"}})
    for place in ({"model": {"from": "base"}}, {"tokenizer": {"end": "</s>", "source": "own"}}):
        Recipe.model_validate({"tokenizer": {"end": "</s>"}} | place)


def test_an_infinite_rate_is_refused() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Recipe.model_validate({"optimizer": {"lr": float("inf")}})


def test_bf16_is_short_for_computing_in_bfloat16() -> None:
    precision = Recipe.model_validate({"sharding": {"precision": "bf16"}}).sharding.precision
    dtypes = dict.fromkeys(
        ("stored_dtype", "reduce_dtype", "sum_dtype", "buffer_dtype", "output_dtype")
    )
    others = {"average": None, "keep_in_fp32_modules": (), "cast_forward_inputs": True}
    assert precision.arguments() == {**dtypes, **others, "param_dtype": torch.bfloat16}


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "bfloat16"])
def test_a_dtype_may_be_written_as_everybody_writes_it(name: str) -> None:
    recipe = Recipe.model_validate({"sharding": {"precision": {"param_dtype": name}}})
    assert recipe.sharding.precision.param_dtype == "bfloat16"


def test_a_section_whose_lines_are_all_comments_is_its_defaults() -> None:
    sections = {"model": None, "sharding": {"prefetch": None}}
    assert Recipe.model_validate(sections) == Recipe()


def test_a_device_is_one_of_the_engine_s_in_any_case() -> None:
    assert Recipe.model_validate({"run": {"device": "CPU"}}).run.device == "cpu"
    for known in ROWS:
        assert Recipe.model_validate({"run": {"device": known.device}}).run.device == known.device


def test_fp32_is_short_for_nothing_changed() -> None:
    recipe = Recipe.model_validate({"sharding": {"precision": "fp32"}})
    assert recipe.sharding.precision == PrecisionConfig()


def test_another_short_precision_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match="'int8' is none of fp32, bf16 and fp16"):
        Recipe.model_validate({"sharding": {"precision": "int8"}})


def test_an_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="nearest is 'full_shard'"):
        Recipe.model_validate({"sharding": {"strategy": "full_shart"}})


def test_a_strategy_is_kept_by_its_own_name() -> None:
    recipe = Recipe.model_validate({"sharding": {"strategy": "ZeRO-3"}})
    assert recipe.sharding.strategy == "full_shard"


@pytest.mark.parametrize("wrap", ["auto", ["Block"], 1000])
def test_wrap_is_a_word_classes_or_a_number(wrap: object) -> None:
    assert Recipe.model_validate({"sharding": {"wrap": wrap}}).sharding.wrap == wrap


def test_a_wrap_from_the_command_line_may_be_a_number() -> None:
    assert Recipe.model_validate({"sharding": {"wrap": "1000"}}).sharding.wrap == 1000


def test_a_compiler_from_the_command_line_may_be_a_switch() -> None:
    words = {"true": True, "false": False, "eager": "eager"}
    assert {w: Recipe(sharding={"compile": w}).sharding.compile for w in words} == words


def test_prefetch_has_the_fields_and_defaults_of_the_engine() -> None:
    assert Prefetch(**PrefetchConfig().model_dump()) == Prefetch()


def test_every_value_has_its_sentence() -> None:
    sections = [field.annotation for field in Recipe.model_fields.values()]
    fields = [f for s in sections if isinstance(s, type) for f in s.model_fields.values()]
    assert len(fields) > 30
    assert [field for field in fields if not field.description] == []


@pytest.mark.parametrize(
    "key",
    [
        *("run.folder", "data.source", "data.validation_source", "tokenizer.source", "model.from"),
        "checkpoint.resume",
    ],
)
def test_the_home_folder_of_nobody_is_refused(key: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ValidationError, match="and ~nosuchuser has no home folder on this machine"):
        Recipe.model_validate({section: {name: "~nosuchuser/x"}})
    Recipe.model_validate({"run": {"folder": "~/x"}, "sample": {"prompt": "~nosuchuser/x"}})


def test_the_best_needs_more_than_one_validation() -> None:
    with pytest.raises(ValueError, match=r"run\.eval_every is 0"):
        Recipe.model_validate({"checkpoint": {"keep_best": True}})
    Recipe.model_validate({"checkpoint": {"keep_best": True}, "run": {"eval_every": 5}})
