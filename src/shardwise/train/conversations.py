"""A row of a data set as a question and its answer, or as messages.

    data.format   columns                      is
    ------------  ---------------------------  ------------------------------------------------
    completion    prompt, completion           text after which, and text that, is trained on
    alpaca        instruction, input, output   the same, with the prompt of Stanford Alpaca
    messages      messages                     a list of {role, content}
    sharegpt      conversations                a list of {from, value}, as messages

Everything is checked here, where the row is at hand: a chat template writes a role that it does
not know, or a missing text, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.errors import ConfigError, nearest
from shardwise.recipe.data_config import COLUMNS, DataConfig

ALPACA = (
    "Below is an instruction that describes a task{input}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n"
)
WITH_INPUT = ", paired with an input that provides further context"
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}

WITH_TOOLS = "conversations with tools are not supported: remove the row"
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message whose text a chat template may write."""
SWITCHES = ("weight", "train")
"""Keys with which other trainers leave a message out of the loss."""
EMPTY: tuple[object, ...] = (None, "", [])

Row = Mapping[str, Any]
Message = dict[str, str]


class Prompted(NamedTuple):
    """A text, and the one that is to follow it."""

    prompt: str
    answer: str

    @property
    def texts(self) -> list[str]:
        return [self.prompt, self.answer]

    @property
    def answers(self) -> list[str]:
        return [self.answer]


class Messages(NamedTuple):
    """A conversation, ``[{"role": …, "content": …}, …]``."""

    messages: list[Message]

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages]

    @property
    def answers(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "assistant"]


Sample = Prompted | Messages


def sample(row: Row, config: DataConfig) -> Sample:
    """The sample in ``row``.

    Raises:
        ConfigError: a column is empty, or what it holds cannot be read.
    """
    column = {name: config.columns.get(name, name) for name in COLUMNS[config.format]}
    if config.format == "completion":
        return Prompted(_text(row, column["prompt"]), _text(row, column["completion"]))
    if config.format == "alpaca":
        input_text = _text(row, column["input"]) if row.get(column["input"]) is not None else ""
        return alpaca(_text(row, column["instruction"]), input_text, _text(row, column["output"]))
    if row.get("tools") not in (*EMPTY, "[]"):
        raise ConfigError(f"column 'tools' describes tools; {WITH_TOOLS}, or empty the column.")
    if config.format == "sharegpt":
        return _messages(_value(row, column["conversations"]), ("from", "value"), SHAREGPT_ROLES)
    roles = {role: role for role in ROLES}
    return _messages(_value(row, column["messages"]), ("role", "content"), roles)


def unread_columns(rows: Iterable[Row], config: DataConfig) -> tuple[str, ...]:
    """Columns with values that data.format does not read, such as a ``system`` beside messages."""
    read = {config.columns.get(name, name) for name in COLUMNS[config.format]}
    filled = (name for row in rows for name, value in row.items() if value not in EMPTY)
    return tuple(name for name in dict.fromkeys(filled) if name not in read)


def check_columns(rows: Sequence[Row], config: DataConfig) -> None:
    """Do the columns of a data set fit data.format?

    Raises:
        ConfigError: a column is in no row; with the format that fits, or the nearest column.
    """
    columns = {name: config.columns.get(name, name) for name in _needed(config.format)}
    missing = {
        name: column
        for name, column in columns.items()
        if rows and not any(column in row for row in rows)
    }
    if not missing:
        return
    present = list(dict.fromkeys(name for row in rows for name in row))
    raise ConfigError(
        f"data.format {config.format} reads {' and '.join(columns.values())}, and no "
        f"{' and no '.join(missing.values())} is among the columns "
        f"{', '.join(present) or '(none)'}; {_column_advice(missing, present, config.field)}."
    )


def _column_advice(missing: Mapping[str, str], present: Sequence[str], field: str) -> str:
    """Say what to do about columns that are ``missing``, by the format's name of each."""
    if not present:
        return "all rows are empty, so name another data.source"
    if renamed := [name for name in missing if name in present]:
        return f"remove {' and '.join(renamed)} from data.columns"
    fitting = [form for form in COLUMNS if {*_needed(form)} <= {*present}]
    fitting += ["text"] * (field in present)
    if fitting:
        return f"set data.format {fitting[0]}"
    name, column = next(iter(missing.items()))
    near = nearest(column, present)[0]
    return f"say which of them it is with data.columns, such as '{{{name}: {near}}}'"


def _needed(form: str) -> list[str]:
    """Columns that a row of the format must have."""
    return [name for name in COLUMNS[form] if name != "input"]


def alpaca(instruction: str, input_text: str = "", output: str = "") -> Prompted:
    """The prompt of Stanford Alpaca, with an input or without, and the answer."""
    prompt = ALPACA.format(input=WITH_INPUT if input_text else "", instruction=instruction)
    return Prompted(
        prompt + f"### Input:\n{input_text}\n\n" * bool(input_text) + "### Response:", output
    )


def _value(row: Row, column: str) -> Any:
    if row.get(column) is None:
        raise ConfigError(f"column {column!r} is empty; write a value, or remove the row.")
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise ConfigError(
            f"column {column!r} is {type(value).__name__}, not text; choose another one with "
            "data.columns, or data.format messages for lists of messages."
        )
    return value


def _messages(value: Any, keys: tuple[str, str], roles: Mapping[str, str]) -> Messages:
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"a conversation is {value!r:.60}; it must be a list of {{{keys[0]}, {keys[1]}}}."
        )
    messages = [_message(message, number, keys, roles) for number, message in enumerate(value, 1)]
    has_question = False
    for number, message in enumerate(messages, start=1):
        if message["role"] == "system" and number > 1:
            is_second = messages[0]["role"] == "system"
            which, fix = ("a second", "Join them") if is_second else ("the", "Move it")
            raise ConfigError(
                f"message {number} is {which} system message; a chat template has one, at the "
                f"beginning. {fix} there."
            )
        if message["role"] == "assistant" and not has_question:
            raise ConfigError(
                f"message {number} is the assistant's, and no user's is before it; remove it, or "
                "write the question that it answers."
            )
        has_question |= message["role"] == "user"
    if messages[-1]["role"] != "assistant":
        raise ConfigError(
            f"the last message is the {messages[-1]['role']}'s, so it has no answer to train on; "
            "remove it, or write the answer."
        )
    return Messages(messages)


def _message(message: Any, number: int, keys: tuple[str, str], roles: Mapping[str, str]) -> Message:
    speaker, content = keys
    if not isinstance(message, Mapping) or speaker not in message or content not in message:
        raise ConfigError(
            f"message {number} is {message!r:.60}; it must have {speaker!r} and {content!r}."
        )
    role, text = str(message[speaker]), message[content]
    if role not in roles:
        raise ConfigError(f"message {number} has the role {role!r}; {_advice(role, roles)}.")
    if not isinstance(text, str):
        raise ConfigError(
            f"message {number}: its {content!r} is {type(text).__name__}, not text. Only text is "
            "trained on; join its parts, and leave calls of tools and images out."
        )
    _check_keys(message, number)
    return {"role": roles[role], "content": text}


def _check_keys(message: Mapping[str, Any], number: int) -> None:
    """Refuse keys that say what is trained on: dropped, they would be lost without a word."""
    lost = [key for key in NOT_READ if message.get(key)]
    lost += [key for key in SWITCHES if message.get(key) not in (None, 1)]
    if lost:
        raise ConfigError(
            f"message {number} has {lost[0]!r}, {message[lost[0]]!r:.60}, which is not read: only "
            "role and text are. Write what is to be trained on into the text, or remove the row."
        )


def _advice(role: str, roles: Mapping[str, str]) -> str:
    if role in ("tool", "function", "function_call", "observation", "ipython"):
        return f"{WITH_TOOLS}, or that message"
    hint = "; data.format sharegpt reads that one" * (role in SHAREGPT_ROLES)
    return f"the roles are {', '.join(roles)}{hint}"
