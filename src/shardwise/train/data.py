"""Rows of tokens on every rank, from files on disk.

Rank 0 reads, trains the tokenizer, encodes and broadcasts. So the text is needed on one machine
only, is read once, and the ranks cannot have different data. Of text that is streamed, rank 0 reads
the beginning, for the tokenizer and the validation split; ``streams`` reads the rest on each rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.checkpoint.collectives import broadcast_object
from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.recipe.recipe import Recipe
from shardwise.train import tokenizer as bpe
from shardwise.train.batches import Rows, RowSource
from shardwise.train.collectives import broadcast_tokens
from shardwise.train.corpus import Corpus, Split, read_corpus, split
from shardwise.train.folder import Folder
from shardwise.train.packed import Examples
from shardwise.train.records import Prepared, PreparedSamples, Streamed
from shardwise.train.samples import Arrays, SampleData, in_rows, read_sample_data
from shardwise.train.streamed_text import StreamedText, open_text
from shardwise.train.streams import StreamedRows
from shardwise.train.worker import worker_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Data:
    """Tokenizer and splits, the same on every rank.

    Attributes:
        tokenizer: text ↔ ids.
        training, validation: the two splits.
        report: the record about the data; on rank 0 only.
        files: the tokenizer's files for the run's folder, by name; on rank 0 only.
    """

    tokenizer: Tokenizer
    training: RowSource | StreamedRows
    validation: RowSource
    report: Prepared | PreparedSamples | Streamed | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the training split, 0 if it is streamed, and of the validation split."""
        training = () if isinstance(self.training, StreamedRows) else self.training.arrays[0]
        return len(training), len(self.validation.arrays[0])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens of both splits, in order; of streamed text, of its files."""
        digest = hashlib.sha256()
        if isinstance(self.training, StreamedRows):
            digest.update(self.training.text.fingerprint.encode())
            digest.update(self.tokenizer.to_str().encode())
        for rows in (self.training, self.validation):
            for array in () if isinstance(rows, StreamedRows) else rows.arrays:
                digest.update(len(array).to_bytes(8, "little"))
                digest.update(array.astype("<i4", copy=False).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class _RankZeroData:
    """Data that rank 0 has read: text, its splits, the tokenizer, and the splits' tokens."""

    corpus: Corpus
    splits: Split
    tokenizer: bpe.TrainedTokenizer
    training: Arrays
    validation: Arrays


def prepare(
    recipe: Recipe,
    comm: Comm,
    folder: Folder | None,
    busy: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Data:
    """Both splits on every rank. A collective; only rank 0 passes a folder, which is not changed.

    Args:
        busy: a context manager around each slow part; it gets the name of the part.

    Raises:
        ConfigError: no text, or not enough of it for one row of each split.
    """
    start = time.perf_counter()
    text = open_text(recipe.data) if recipe.data.streaming.streams else None
    if text is not None:  # every rank reads its part of it
        comm.agree({"the text that data.source names": text.fingerprint})
    read: _RankZeroData | SampleData | None = None
    if folder is not None and recipe.data.format != "text":
        read = read_sample_data(recipe, folder, busy)
    elif folder is not None:
        read = _read(recipe, folder, busy, text)
    text_of_rank_0 = "" if read is None else read.tokenizer.text
    tokenizer = bpe.load(broadcast_object(comm, text_of_rank_0, "tokenizer, which rank 0 has"))
    training: RowSource | StreamedRows
    if text is None:
        training = _rows(
            comm, None if read is None else read.training, recipe.data, "training tokens"
        )
    else:
        training = StreamedRows(text, tokenizer, recipe, worker_of(recipe.outer))
    validation = _rows(
        comm, None if read is None else read.validation, recipe.data, "validation tokens"
    )
    _check_enough({"training": training, "validation": validation}, recipe)
    data = Data(tokenizer, training, validation)
    if read is None:
        return data
    report = _report(read, data, comm.size, time.perf_counter() - start)
    return replace(data, report=report, files=read.tokenizer.files)


def _rows(comm: Comm, arrays: Arrays | None, config: DataConfig, what: str) -> RowSource:
    """The rows of rank 0's ``arrays`` on every rank."""
    number = 1 if config.format == "text" else 3
    ids, *marks = (
        broadcast_tokens(comm, None if arrays is None else arrays[index].astype(np.int32), what)
        for index in range(number)
    )
    if not marks:
        return Rows(ids, config.context)
    trained, lengths = marks
    return in_rows(Examples(ids, trained.astype(np.bool_), lengths.astype(np.int64)), config)


def _read(
    recipe: Recipe,
    folder: Folder,
    busy: Callable[[str], AbstractContextManager[Any]],
    streamed: StreamedText | None,
) -> _RankZeroData:
    with busy("reading text"):
        corpus = streamed.read_head() if streamed else read_corpus(recipe.data)
        splits = streamed.split(corpus) if streamed else split(corpus, recipe.data.validation)
    with busy("training the tokenizer"):
        added = recipe.adapter.new_tokens
        tokenizer_file = bpe.load_or_train(folder, splits.training, recipe.tokenizer, added)
    with busy("tokenizing"):
        tokenizer, end = bpe.load(tokenizer_file.text), recipe.tokenizer.end
        training = bpe.encode(tokenizer, () if streamed else splits.training, end)
        validation = bpe.encode(tokenizer, splits.validation, end)
    return _RankZeroData(corpus, splits, tokenizer_file, (training,), (validation,))


def _report(
    read: _RankZeroData | SampleData, data: Data, ranks: int, seconds: float
) -> Prepared | PreparedSamples | Streamed:
    training, validation = data.training, data.validation
    vocabulary, origin = data.tokenizer.get_vocab_size(), read.tokenizer.origin
    if isinstance(read, SampleData) and not isinstance(training, StreamedRows):
        return read.report((training, validation), vocabulary, seconds)
    if isinstance(training, StreamedRows):
        corpus = None if isinstance(read, SampleData) else read.corpus
        return Streamed(
            source=corpus.name if corpus else training.recipe.data.source,
            shards=training.text.shards,
            streams=training.streams,
            ranks=ranks,
            shuffle=training.recipe.data.streaming.shuffle,
            nbytes=corpus.nbytes if corpus else 0,
            validation=data.tokens[1],
            vocabulary=vocabulary,
            origin=origin,
            seconds=seconds,
        )
    assert isinstance(read, _RankZeroData)
    corpus = read.corpus
    assert isinstance(training, Rows)
    assert isinstance(validation, Rows)
    return Prepared(
        source=corpus.name,
        files=corpus.files,
        nbytes=corpus.nbytes,
        left_out=corpus.left_out,
        capped=corpus.capped,
        documents=(len(read.splits.training), len(read.splits.validation)),
        tokens=data.tokens,
        rows=(len(training), len(validation)),
        context=training.context,
        dropped=(training.dropped, validation.dropped),
        vocabulary=vocabulary,
        origin=origin,
        seconds=seconds,
    )


def _check_enough(splits: Mapping[str, RowSource | StreamedRows], recipe: Recipe) -> None:
    for name, rows in splits.items():
        if not isinstance(rows, StreamedRows) and not len(rows):
            key = "data.max_bytes" if recipe.data.streaming.streams else "data.context"
            raise ConfigError(
                f"the {name} split has {len(rows.arrays[0])} tokens, fewer than one row of "
                f"data.context {rows.context} + 1; give it more text, or change {key} or "
                "data.validation."
            )
