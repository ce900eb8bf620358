"""From files on disk to rows of tokens on every rank.

Rank 0 reads, trains the tokenizer, encodes and broadcasts. So the text is needed on one machine
only, is read once, and the ranks cannot have different data.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError
from shardwise.train import tokenizer as bpe
from shardwise.train.batches import Rows
from shardwise.train.collectives import broadcast_text, broadcast_tokens
from shardwise.train.config import Recipe
from shardwise.train.corpus import read_corpus, split
from shardwise.train.folder import Folder
from shardwise.train.records import Prepared

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Data", "prepare"]


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
    training: Rows
    validation: Rows
    report: Prepared | None
    files: Mapping[str, str]

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the training and the validation split."""
        return len(self.training.stream), len(self.validation.stream)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens of both splits, in order."""
        digest = hashlib.sha256()
        for rows in (self.training, self.validation):
            digest.update(len(rows.stream).to_bytes(8, "little"))
            digest.update(rows.stream.astype("<i4", copy=False).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class _RankZeroData:
    """Tokenizer, token streams and report on rank 0."""

    tokenizer: bpe.TrainedTokenizer
    training: bpe.Tokens
    validation: bpe.Tokens
    report: Prepared


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
    read = None if folder is None else _read(recipe, folder, busy)
    text = broadcast_text(
        comm,
        None if read is None else read.tokenizer.text,
        "tokenizer, which rank 0 trains",
    )
    training = broadcast_tokens(comm, None if read is None else read.training, "training tokens")
    validation = broadcast_tokens(
        comm, None if read is None else read.validation, "validation tokens"
    )
    context = recipe.data.context
    seconds = time.perf_counter() - start
    return Data(
        bpe.load(text),
        Rows(training, context),
        Rows(validation, context),
        None if read is None else replace(read.report, seconds=seconds),
        {} if read is None else read.tokenizer.files,
    )


def _read(
    recipe: Recipe, folder: Folder, busy: Callable[[str], AbstractContextManager[Any]]
) -> _RankZeroData:
    with busy("reading text"):
        corpus = read_corpus(recipe.data)
        splits = split(corpus, recipe.data.validation)
    with busy("training the tokenizer"):
        tokenizer_file = bpe.load_or_train(folder, splits.training, recipe.tokenizer.vocabulary)
    with busy("tokenizing"):
        tokenizer = bpe.load(tokenizer_file.text)
        streams = bpe.encode(tokenizer, splits.training), bpe.encode(tokenizer, splits.validation)
    rows = [Rows(stream, recipe.data.context) for stream in streams]
    _check_enough(rows, recipe)
    report = Prepared(
        source=corpus.name,
        files=corpus.files,
        nbytes=corpus.nbytes,
        left_out=corpus.left_out,
        capped=corpus.capped,
        documents=(len(splits.training), len(splits.validation)),
        tokens=(len(streams[0]), len(streams[1])),
        rows=(len(rows[0]), len(rows[1])),
        context=recipe.data.context,
        dropped=(rows[0].dropped, rows[1].dropped),
        vocabulary=tokenizer.get_vocab_size(),
        cached=tokenizer_file.cached,
        seconds=0.0,
    )
    return _RankZeroData(tokenizer_file, streams[0], streams[1], report)


def _check_enough(rows: list[Rows], recipe: Recipe) -> None:
    for name, split_rows in zip(("training", "validation"), rows, strict=True):
        if len(split_rows) == 0:
            raise ConfigError(
                f"the {name} split has {len(split_rows.stream)} tokens, fewer than one row of "
                f"data.context {recipe.data.context} + 1; give it more text, or change "
                "data.context or data.validation."
            )
