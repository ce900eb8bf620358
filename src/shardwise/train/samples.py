"""The samples of a recipe: read, split, and tokenised into rows.

The first rows of a data set are for validation, so that the split depends on neither a seed nor
the rest of the data. No sample is left out, cut or padded without being counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.recipe.recipe import Recipe
from shardwise.train import tokenizer as bpe
from shardwise.train.batches import Rows, RowSource
from shardwise.train.conversations import Sample, check_columns, sample, unread_columns
from shardwise.train.corpus import MAX_PLACES
from shardwise.train.examples import tokenize, write
from shardwise.train.folder import Folder
from shardwise.train.packed import Examples, SampleRows
from shardwise.train.records import LeftOut, PreparedSamples
from shardwise.train.sources import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class SampleSplit:
    """Samples of one split.

    Attributes:
        source: of the samples.
        samples: those that have an answer.
        numbers: the row of each, counted from 1.
        empty: rows without one.
        unread: columns that the format does not read.
    """

    source: str
    samples: list[Sample]
    numbers: list[int]
    empty: list[int]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizedSplit:
    """A split as tokens.

    Attributes:
        examples: the samples that are trained on.
        cut: samples that were longer than data.context, and the tokens that were cut off.
        left_out: samples that could not be used, by reason.
    """

    examples: Examples
    cut: tuple[int, int] = (0, 0)
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class SampleData:
    """Samples that rank 0 has read: the tokenizer, and both splits as tokens.

    Attributes:
        unread: columns of the data that the format does not read.
    """

    recipe: Recipe
    tokenizer: bpe.TrainedTokenizer
    splits: tuple[TokenizedSplit, TokenizedSplit]
    unread: tuple[str, ...]

    @property
    def training(self) -> Arrays:
        return self.splits[0].examples.arrays

    @property
    def validation(self) -> Arrays:
        return self.splits[1].examples.arrays

    def report(
        self, rows: tuple[RowSource, RowSource], vocabulary: int, seconds: float
    ) -> PreparedSamples:
        """The record about the samples in ``rows``."""
        config, (training, validation) = self.recipe.data, self.splits
        first, second = training.examples, validation.examples
        return PreparedSamples(
            source=config.source,
            format=config.format,
            samples=(len(first), len(second)),
            left_out=(*training.left_out, *validation.left_out),
            unread=self.unread,
            cut=(training.cut[0] + validation.cut[0], training.cut[1] + validation.cut[1]),
            tokens=(len(first.ids), len(second.ids)),
            trained=(_targets(first, rows[0]), _targets(second, rows[1])),
            rows=(len(rows[0]), len(rows[1])),
            context=config.context,
            packing=config.packing,
            unused=(rows[0].dropped, rows[1].dropped),
            vocabulary=vocabulary,
            origin=self.tokenizer.origin,
            seconds=seconds,
        )


def _targets(examples: Examples, rows: RowSource) -> int:
    """Tokens that are trained on in an epoch; the first of a row, or of a sample, is not."""
    if isinstance(rows, Rows):
        return int(examples.trained[1 : len(rows) * rows.context + 1].sum())
    return int(examples.targets.sum())


def read_sample_data(
    recipe: Recipe, folder: Folder, busy: Callable[[str], AbstractContextManager[Any]]
) -> SampleData:
    """Read, and tokenise, the samples of ``recipe``.

    Args:
        folder: of the run, which is not changed.
        busy: as for ``data.prepare``.
    """
    if recipe.data.streaming.streams and recipe.tokenizer.source is None:
        raise ConfigError(
            "data.streaming reads samples while the model trains, so no tokenizer can be trained "
            "on them before; name one with tokenizer.source."
        )
    with busy("reading samples"):
        training, validation = read_samples(recipe.data)
    added = recipe.adapter.new_tokens
    with busy("training the tokenizer"):
        texts = [text for parsed in training.samples for text in parsed.texts]
        tokenizer_file = bpe.load_or_train(folder, texts, recipe.tokenizer, added)
    with busy("tokenizing"):
        tokenizer = bpe.of_transformers(tokenizer_file.text, recipe.tokenizer, added)
        first = TokenizedSplit(tokenize([], tokenizer, recipe.data.context).examples)
        if not recipe.data.streaming.streams:
            first = tokenize_split(training, tokenizer, recipe.data)
            _check_answers(first, training, recipe.data)
        second = tokenize_split(validation, tokenizer, recipe.data)
        _check_answers(second, validation, recipe.data)
    unread = tuple(dict.fromkeys((*training.unread, *validation.unread)))
    return SampleData(recipe, tokenizer_file, (first, second), unread)


def _check_answers(tokenized: TokenizedSplit, split: SampleSplit, config: DataConfig) -> None:
    if not len(tokenized.examples):
        raise ConfigError(
            f"data.source {split.source}: no answer begins within the first {config.context} "
            f"tokens of its sample, in all {len(split.samples)} of them. Raise data.context."
        )


def read_samples(config: DataConfig) -> tuple[SampleSplit, SampleSplit]:
    """The samples for training and for validation.

    Raises:
        ConfigError: the data cannot be read, or a row is malformed; with its number.
    """
    is_streamed, source = config.streaming.streams is not None, config.validation_source
    read = [] if is_streamed else read_rows(config.source, config.split)
    rows = list(enumerate(read, start=1))
    if source is not None:
        held_out = list(enumerate(read_rows(source, config.split), start=1))
    else:
        count = max(1, round(len(rows) * config.validation))
        held_out, rows = rows[:count], rows[count:]
    training, validation = (
        replace(_split(name, some, config), unread=unread_columns((r for _, r in some), config))
        for name, some in ((config.source, rows), (source or config.source, held_out))
    )
    for name, split in (("training", training), ("validation", validation)):
        if not split.samples and not (is_streamed and name == "training"):
            raise ConfigError(
                f"data.source {split.source} has no samples for {name}: {len(rows)} rows are for "
                f"training, {len(held_out)} for validation, and {len(split.empty)} of these have "
                "no answer. Add samples, or change data.validation."
            )
    return training, validation


def _split(
    source: str, rows: Sequence[tuple[int, dict[str, Any]]], config: DataConfig
) -> SampleSplit:
    split = SampleSplit(source, [], [], [])
    try:
        check_columns([row for _, row in rows], config)
    except ConfigError as error:
        raise ConfigError(f"data.source {source}: {error}") from None
    for number, row in rows:
        try:
            parsed = sample(row, config)
        except ConfigError as error:
            raise ConfigError(f"data.source {source}, row {number}: {error}") from None
        if all(answer.strip() for answer in parsed.answers):
            split.samples.append(parsed)
            split.numbers.append(number)
        else:
            split.empty.append(number)
    return split


def tokenize_split(
    split: SampleSplit, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> TokenizedSplit:
    """The samples of ``split`` as tokens.

    Raises:
        ConfigError: a sample cannot be written as text; with its row.
    """
    written = []
    for number, parsed in zip(split.numbers, split.samples, strict=True):
        try:
            written.append(write(parsed, tokenizer, config.loss_on))
        except ConfigError as error:
            raise ConfigError(f"data.source {split.source}, row {number}: {error}") from error
    tokenized = tokenize(written, tokenizer, config.context)
    too_long = [split.numbers[index] for index in tokenized.left_out]
    reasons = {
        "empty answer": split.empty,
        f"no answer within data.context {config.context}": too_long,
    }
    return TokenizedSplit(tokenized.examples, tokenized.cut, tuple(_left_out(reasons)))


def window_rows(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> SampleRows:
    """The samples of a few rows that were streamed, in rows; what is lost is logged.

    Raises:
        ConfigError: a row is malformed; with its number among these.
    """
    split = _split(f"{config.source}, streamed window", [*enumerate(rows, start=1)], config)
    tokenized = tokenize_split(split, tokenizer, config)
    lost = [f"left out {out}" for out in tokenized.left_out]
    if tokenized.cut[0]:
        lost.append(f"{tokenized.cut[0]} samples cut by {tokenized.cut[1]:,} tokens")
    if lost:
        logger.warning("Of %d streamed samples: %s.", len(rows), "; ".join(lost))
    return SampleRows(tokenized.examples, config.context, packed=bool(config.packing))


def _left_out(reasons: dict[str, list[int]]) -> Iterator[LeftOut]:
    for reason, numbers in reasons.items():
        if numbers:
            places = tuple(f"row {number:,}" for number in numbers[:MAX_PLACES])
            yield LeftOut(reason, rows=len(numbers), places=places)


def in_rows(examples: Examples, config: DataConfig) -> Rows | SampleRows:
    """The samples in rows, as data.packing says."""
    if config.packing == "concatenate":
        return Rows(examples.ids, config.context, examples.trained)
    return SampleRows(examples, config.context, packed=bool(config.packing))
