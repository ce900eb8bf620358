from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.train.conversations import Messages, Prompted, check_columns, sample

ASK, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}


def config(form: str, **columns: str) -> DataConfig:
    return DataConfig.model_validate({"format": form, "source": "x.jsonl", "columns": columns})


def messages(*given: Any) -> Any:
    return sample({"messages": list(given)}, config("messages"))


def test_alpaca_s_prompt_with_an_input_and_without() -> None:
    """As Stanford Alpaca wrote it, to the character."""
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "not read"}
    assert sample(row, config("alpaca")) == Prompted(
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:",
        "3",
    )
    without = Prompted(
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd.\n\n### Response:",
        "3",
    )
    assert sample(row | {"input": ""}, config("alpaca")) == without
    assert sample(row | {"input": None}, config("alpaca")) == without
    del row["input"]
    assert sample(row, config("alpaca")) == without


def test_a_completion_and_columns_of_other_names() -> None:
    assert sample({"prompt": "1 + 1 =", "completion": " 2"}, config("completion")) == Prompted(
        "1 + 1 =", " 2"
    )
    row = {"question": "Q", "a": "A"}
    example = sample(row, config("completion", prompt="question", completion="a"))
    assert example == Prompted("Q", "A")


def test_sharegpt_is_messages() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A", "weight": 1.0, "train": True, "tool_calls": None},
        ],
        "tools": "[]",
    }
    assert sample(row, config("sharegpt")) == messages(SYSTEM, ASK, ANSWER)
    assert messages(SYSTEM, ASK, ANSWER) == Messages([SYSTEM, ASK, ANSWER])
    assert messages(ASK, ANSWER, ASK, ANSWER).answers == ["A", "A"]


@pytest.mark.parametrize(
    ("form", "columns", "fix"),
    [
        ("alpaca", "instruction outputs", "say which .* such as '{output: outputs}'."),
        ("alpaca", "messages id", "and no output is among the columns messages, id; .* messages"),
        ("messages", "instruction input output", "set data.format alpaca."),
        ("completion", "id text", "set data.format text."),
    ],
)
def test_columns_that_are_not_there_show_another_format_or_another_name(
    form: str, columns: str, fix: str
) -> None:
    row = dict.fromkeys(columns.split(), "x")
    with pytest.raises(ConfigError, match=f"^data.format {form} reads .*{fix}"):
        check_columns([row, row], config(form))
    check_columns([row, {"prompt": "Q", "completion": "A"}], config("completion"))
    check_columns([{"q": "Q", "completion": "A"}], config("completion", prompt="q"))


@pytest.mark.parametrize(
    ("columns", "rows", "fix"),
    [
        ("output: answr", "instruction answer", "such as '{output: answer}'"),
        ("instruction: q", "instruction output", "remove instruction from data.columns"),
        (
            "instruction: q, output: a",
            "instruction output",
            "remove instruction and output from data.columns",
        ),
        ("", "", "(none); all rows are empty, so name another data.source"),
    ],
)
def test_the_advice_on_columns_is_one_that_the_recipe_accepts(
    columns: str, rows: str, fix: str
) -> None:
    """Also where the first row is empty."""
    named = config("alpaca", **dict(pair.split(": ") for pair in columns.split(", ") if pair))
    with pytest.raises(ConfigError) as caught:
        check_columns([{}, dict.fromkeys(rows.split(), "x")], named)
    assert str(caught.value).endswith(f"{fix}.")


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("alpaca", {"instruction": "Q", "outputs": "A"}, "column 'output' is empty; write a va"),
        ("completion", {"prompt": None, "completion": "A"}, "column 'prompt' is empty; write"),
        ("completion", {"prompt": ["Q"], "completion": "A"}, "column 'prompt' is list, not text;"),
        ("messages", {"messages": "Q"}, "a conversation is 'Q'; it must be a list of {role, con"),
        ("messages", {"messages": []}, "a conversation is []; it must be a list"),
        (
            "messages",
            {"messages": [ASK, ANSWER], "tools": "[{}]"},
            "column 'tools' describes tools",
        ),
    ],
)
def test_a_row_without_what_the_format_needs(form: str, row: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sample(row, config(form))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([ASK, SYSTEM, ANSWER], "message 2 is the system message; a chat template has one, at the"),
        ([SYSTEM, SYSTEM, ASK, ANSWER], "message 2 is a second system message; .* Join them there"),
        ([ANSWER, ASK, ANSWER], "message 1 is the assistant's, and no user's is before it; remove"),
        ([SYSTEM, ANSWER], "message 2 is the assistant's, and no user's is before it"),
        ([ASK, ANSWER, ASK], "the last message is the user's, so it has no answer to train on"),
        ([{"role": "human", "content": "Q"}], "has the role 'human'; .*; data.format sharegpt re"),
        ([{"role": "bot", "content": "Q"}], "the role 'bot'; the roles are system, user, assista"),
        ([ASK, {"role": "tool", "content": "4"}], "conversations with tools are not supported: re"),
        ([ASK, {"role": "assistant"}], "message 2 is .*; it must have 'role' and 'content'."),
        (["Q"], "message 1 is 'Q'; it must have 'role' and 'content'."),
        ([{"role": "user", "content": [{"type": "image"}]}], "its 'content' is list, not text."),
        ([ASK | {"role": ["user"]}], "message 1 has the role .* the roles are system, user"),
        (
            [ASK, ANSWER | {"tool_calls": [{"name": "f"}]}],
            "2 has 'tool_calls', .*, which is not re",
        ),
        (
            [ASK, ANSWER | {"reasoning_content": "As"}],
            "2 has 'reasoning_content', 'As', which is no",
        ),
        ([ASK, ANSWER | {"weight": 0}], "message 2 has 'weight', 0, .* or remove the row"),
        ([ASK, ANSWER | {"train": False}], "message 2 has 'train', False, which is not read"),
    ],
)
def test_messages_that_no_template_should_be_given(given: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        messages(*given)
