from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.recipe.data_config import DataConfig


def test_packing_is_yes_no_or_a_word() -> None:
    for packing in (True, False, "concatenate"):
        config = DataConfig.model_validate({"format": "alpaca", "source": "a", "packing": packing})
        assert config.packing is packing or config.packing == packing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": False}, "format is text, for which data.packing means nothing; leave it out"),
        ({"format": "alpaca", "source": "a", "max_bytes": 9}, "alpaca, for which data.max_bytes "),
        ({"format": "alpaca"}, "format is alpaca and source is stdlib, which is text; name the sa"),
        (
            {"format": "alpaca", "source": "a", "columns": {"answer": "x"}},
            "columns has 'answer', which alpaca does not read; its columns are instruction",
        ),
        (
            {"format": "alpaca", "source": "a.jsonl.gz", "split": "test"},
            "split is 'test', and source a.jsonl.gz is one file, all rows of which are read; leave",
        ),
    ],
)
def test_keys_that_the_format_does_not_read(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(fields)
