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

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.errors import ConfigError, nearest
from shardwise.train.data_config import COLUMNS, DataConfig

__all__ = ["Message", "Messages", "Prompted", "Sample", "sample"]

ALPACA = (
    "Below is an instruction that describes a task{input}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n"
)
WITH_INPUT = ", paired with an input that provides further context"
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}

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
        ConfigError: a column is missing, or what it holds cannot be read.
    """
    column = {name: config.columns.get(name, name) for name in COLUMNS[config.format]}
    if config.format == "completion":
        return Prompted(_text(row, column["prompt"]), _text(row, column["completion"]))
    if config.format == "alpaca":
        given = _text(row, column["input"]) if row.get(column["input"]) is not None else ""
        return _alpaca(_text(row, column["instruction"]), given, _text(row, column["output"]))
    if config.format == "sharegpt":
        return _messages(_value(row, column["conversations"]), ("from", "value"), SHAREGPT_ROLES)
    roles = {role: role for role in ROLES}
    return _messages(_value(row, column["messages"]), ("role", "content"), roles)


def _alpaca(instruction: str, given: str, output: str) -> Prompted:
    prompt = ALPACA.format(input=WITH_INPUT if given else "", instruction=instruction)
    return Prompted(prompt + f"### Input:\n{given}\n\n" * bool(given) + "### Response:", output)


def _value(row: Row, column: str) -> Any:
    if row.get(column) is not None:
        return row[column]
    if column in row:
        raise ConfigError(f"column {column!r} is empty; write a value, or remove the row.")
    raise ConfigError(
        f"there is no column {column!r}. The columns are {', '.join(row)}; say which of them it is "
        f"with data.columns, such as --data.columns '{{{column}: {nearest(column, row)[0]}}}'."
    )


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
    asked = False
    for number, message in enumerate(messages, start=1):
        if message["role"] == "system" and number > 1:
            again = messages[0]["role"] == "system"
            raise ConfigError(
                f"message {number} is {'a second' if again else 'the'} system message; a chat "
                f"template has one, at the beginning. {'Join them' if again else 'Move it'} there."
            )
        if message["role"] == "assistant" and not asked:
            raise ConfigError(
                f"message {number} is the assistant's, and no user's is before it; remove it, or "
                "write the question that it answers."
            )
        asked |= message["role"] == "user"
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
    role, text = message[speaker], message[content]
    if role not in roles:
        raise ConfigError(f"message {number} has the role {role!r}; {_advice(role, roles)}.")
    if not isinstance(text, str):
        raise ConfigError(
            f"message {number}: its {content!r} is {type(text).__name__}, not text. Only text is "
            "trained on; join its parts, and leave calls of tools and images out."
        )
    return {"role": roles[role], "content": text}


def _advice(role: str, roles: Mapping[str, str]) -> str:
    if role in ("tool", "function", "function_call", "observation", "ipython"):
        return "conversations with tools are not supported: remove the row, or that message"
    other = "; data.format sharegpt reads that one" * (role in SHAREGPT_ROLES)
    return f"the roles are {', '.join(roles)}{other}"
