r"""Samples as token ids, each with a mark of whether it is trained on.

A sample is written as one text, with the ranges of characters that are trained on, and tokenised
as a whole: pieces that are tokenised by themselves join to other tokens than the model will read.
A token is trained on if one of its characters is.

    <|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n
                                                                     ──────────────

The answers of a conversation are what the chat template puts in ``{% generation %}``. Of a template
without it they are what each answer adds to the text before it, and the text before must be the
beginning of the text after, which is checked. The end token after an answer is trained on, whether
or not it is within that block and whatever the id of the padding is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.conversations import Message, Messages, Sample
from shardwise.train.packed import Examples
from shardwise.train.tokenizer import ENCODE_BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Marks = NDArray[np.bool_]


class Written(NamedTuple):
    """A sample as text.

    Attributes:
        text: of the whole sample.
        trained: ranges of its characters that are trained on.
        special: the tokenizer adds its special tokens; a chat template has written them.
    """

    text: str
    trained: list[tuple[int, int]]
    special: bool


def write(sample: Sample, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> Written:
    """``sample`` as text.

    Raises:
        ConfigError: there is no chat template, or it does not accept the messages.
    """
    if isinstance(sample, Messages):
        text, trained = _conversation(sample.messages, tokenizer, loss_on)
        _check_contents(sample.messages, text)
    else:
        text = sample.prompt + sample.answer
        trained = [(len(sample.prompt), len(text))]
    trained = trained if loss_on == "assistant" else [(0, len(text))]
    return Written(text, trained, special=not isinstance(sample, Messages))


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own.

    Raises:
        ConfigError: it has none.
    """
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise ConfigError(
            "the tokenizer has no chat template, which says how messages are written. Choose a "
            "model with one, such as an -Instruct model; or data.format alpaca or completion."
        ) from None


def _conversation(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, loss_on: str
) -> tuple[str, list[tuple[int, int]]]:
    """The text that the chat template writes, and the ranges of the answers, if they matter."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template = chat_template(tokenizer)
    try:
        if loss_on == "all":
            return str(tokenizer.apply_chat_template(messages, tokenize=False)), []
        if re.search(r"{%[-+]?\s*generation\s*[-+]?%}", template):
            render: Any = render_jinja_template
            (text,), (ranges,) = render(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
            return str(text), [(start, end) for start, end in ranges]
        return _by_prefix(messages, tokenizer)
    except TemplateError as error:
        raise ConfigError(f"the chat template refuses these messages: {error}") from error


def _check_contents(messages: list[Message], text: str) -> None:
    """Is each message in ``text``? A template for lists of contents leaves plain text out."""
    for number, message in enumerate(messages, start=1):
        words = re.findall(r"\w+", message["content"])  # the last: others may be thoughts
        if words and words[-1] not in text:
            raise ConfigError(
                f"the chat template leaves out what message {number} ({message['role']}) says: "
                f"{words[-1]!r:.40} is not in the text that it writes. Leave the message out, or "
                "choose a tokenizer whose template writes it."
            )


def _by_prefix(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    def text(messages: list[Message], ask: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        )

    whole, ranges = text(messages), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = text(messages[:number], ask=True), text(messages[: number + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise ConfigError(
                f"the chat template writes what is before message {number + 1} in another way "
                "once it is answered, so its text does not show which part is the answer. Put "
                "{% generation %} … {% endgeneration %} around the answer in the template, or set "
                "data.loss_on all."
            )
        ranges.append((len(before), len(after)))
    return whole, ranges


# --- tokens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenized:
    """Samples as tokens.

    Attributes:
        examples: those that have a token to train on.
        cut: samples longer than the context, and tokens of theirs that were cut off.
        left_out: indices of samples that the cut left without a token to train on.
    """

    examples: Examples
    cut: tuple[int, int]
    left_out: list[int]


def tokenize(
    written: Sequence[Written], tokenizer: PreTrainedTokenizerBase, context: int
) -> Tokenized:
    """The samples as tokens, at most ``context`` of each.

    Raises:
        ConfigError: the tokenizer has no end token, or cannot say where a token is in the text.
    """
    _check(tokenizer)
    pairs = [
        pair
        for start in range(0, len(written), ENCODE_BATCH)
        for pair in _encode(written[start : start + ENCODE_BATCH], tokenizer)
    ]
    beyond = [len(ids) - context for ids, _ in pairs if len(ids) > context]
    pairs = [(ids[:context], trained[:context]) for ids, trained in pairs]
    samples = [(ids, trained) for ids, trained in pairs if trained[1:].any()]
    left_out = [index for index, (_, trained) in enumerate(pairs) if not trained[1:].any()]
    empty = np.empty(0, np.int32), np.empty(0, np.bool_)
    ids, trained = (np.concatenate(arrays) for arrays in zip(empty, *samples, strict=True))
    lengths = np.array([len(ids) for ids, _ in samples], np.int64)
    return Tokenized(Examples(ids, trained, lengths), (len(beyond), sum(beyond)), left_out)


def _check(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end token (eos_token), so a model could not learn where an "
            "answer ends. Set eos_token in its tokenizer_config.json."
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say where a token is in the text, so answers "
            "cannot be told from prompts. Save it as a tokenizer.json: load it with use_fast=True."
        )


def _encode(
    written: Sequence[Written], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[NDArray[np.int32], Marks]]:
    special = written[0].special
    encoded: Any = tokenizer(
        [sample.text for sample in written],
        add_special_tokens=special,
        split_special_tokens=special,  # "<|endoftext|>" in a document is plain text
        return_offsets_mapping=True,
        verbose=False,
    )
    each = zip(written, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [
        _marked(sample, np.array(ids, np.int32), np.array(places), tokenizer.eos_token_id)
        for sample, ids, places in each
    ]


def _marked(
    sample: Written, ids: NDArray[np.int32], places: NDArray[np.int64], end: int
) -> tuple[NDArray[np.int32], Marks]:
    """The ids and which of them are trained on, with the end token if there is none yet."""
    starts, ends = places.reshape(-1, 2).T
    # Of white space a tokenizer may say where it ends only: it begins where the token before ends.
    starts = np.where((starts == ends) & (ends > 0), np.append(0, ends[:-1]), starts)
    trained = np.zeros(len(ids), np.bool_)
    for first, last in sample.trained:
        trained |= (starts < last) & ((ends > first) | (starts >= first)) & (ends > 0)
    trained[1:] |= (ids[1:] == end) & trained[:-1]
    is_last = [not sample.text[ends[place] :].strip() for place in np.flatnonzero(ids == end)]
    if any(is_last) or (len(ids) and ids[-1] == end):
        return ids, trained
    return np.append(ids, np.int32(end)), np.append(trained, True)
