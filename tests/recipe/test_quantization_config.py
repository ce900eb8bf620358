"""``model.quantization``: a base of codes, with an adapter that is trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.format_records import format_record
from shardwise.errors import ConfigError
from shardwise.recipe.quantization_config import QuantizationConfig
from shardwise.train.records import Built
from tests.hf.quantising import quantising_one_at_a_time
from tests.train.test_adapter import check_prediction, recipe, run, weights

one_at_a_time = quantising_one_at_a_time
pytestmark = [
    pytest.mark.usefixtures("one_at_a_time"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.mark.prove
def test_a_recipe_trains_an_adapter_on_four_bits_and_says_what_was_quantised(
    tmp_path: Path,
) -> None:
    records = run(recipe(tmp_path, "model.quantization.bits=4", "data.context=8"), 2)
    (built,) = [record for record in records if isinstance(record, Built)]
    check_prediction(records)
    text = "\n".join(format_record(built))
    assert "14 linear layers quantised: nf4 with scales in 8 bits, computed in bfloat16" in text
    assert "|| all params: 36,576 ||" in text
    assert "model     36,576 parameters" in text  # and not the bytes that hold them
    assert all(value.any() for value in weights(tmp_path).values())


def test_it_is_what_transformers_takes() -> None:
    assert QuantizationConfig().config() is None
    config = QuantizationConfig(bits=4, type="fp4", double=False, skip=("lm_head",)).config()
    assert config is not None
    assert config.quantization_method() == "fp4"
    assert not config.bnb_4bit_use_double_quant
    assert str(config.bnb_4bit_compute_dtype) == "torch.bfloat16"
    assert config.llm_int8_skip_modules == ["lm_head"]
    of_8_bits = QuantizationConfig(bits=8).config()
    assert of_8_bits is not None
    assert of_8_bits.quantization_method() == "llm_int8"


WITHOUT_ADAPTER = ["adapter.rank=null", "adapter.targets=all-linear"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.quantization.double=false"], "double has no effect"),
        (["model.quantization.bits=8", "model.quantization.compute=float32"], "compute has no"),
        (["model.quantization.bits=4", *WITHOUT_ADAPTER], "Set adapter.rank"),
        (["model.quantization.bits=4", "sharding.precision=fp16"], "Set both alike"),
    ],
)
def test_what_has_no_effect_or_contradicts_is_refused(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        recipe(tmp_path, *overrides)
