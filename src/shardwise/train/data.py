"""From a place on disk to rows of tokens on every rank.

Rank 0 reads, learns the tokenizer and encodes; the others receive. So the text need be on one
machine only, nothing is read W times, and the ranks cannot hold different data.
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
from shardwise.train.config import Recipe
from shardwise.train.corpus import read_corpus, split
from shardwise.train.exchange import from_rank_0, text_from_rank_0
from shardwise.train.folder import Folder
from shardwise.train.metrics import Prepared

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Data", "prepare"]


@dataclass(frozen=True)
class Data:
    """What there is to train on, alike on every rank.

    Attributes:
        tokenizer: text ↔ ids.
        training, validation: the two splits.
        report: what was read; on rank 0 only.
        files: of the tokenizer, which the run's folder is to keep; on rank 0 only.
    """

    tokenizer: Tokenizer
    training: Rows
    validation: Rows
    report: Prepared | None
    files: Mapping[str, str]

    @property
    def tokens(self) -> tuple[int, int]:
        """In the training and the validation split."""
        return len(self.training.stream), len(self.validation.stream)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens in the same order, in both splits."""
        whole = hashlib.sha256()
        for rows in (self.training, self.validation):
            whole.update(len(rows.stream).to_bytes(8, "little"))
            whole.update(rows.stream.astype("<i4", copy=False).tobytes())
        return whole.hexdigest()


@dataclass(frozen=True)
class _Read:
    """What rank 0 read."""

    tokenizer: bpe.Obtained
    training: bpe.Tokens
    validation: bpe.Tokens
    report: Prepared


def prepare(
    recipe: Recipe,
    comm: Comm,
    folder: Folder | None,
    busy: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Data:
    """Both splits on every rank. A collective; rank 0 passes its folder, in which nothing changes.

    Args:
        busy: entered with what is done inside, for each part that may take long.

    Raises:
        ConfigError: no text, or not enough of it for one row of each split.
    """
    start = time.perf_counter()
    read = None if folder is None else _read(recipe, folder, busy)
    text = text_from_rank_0(
        comm, None if read is None else read.tokenizer.text, "tokenizer, which rank 0 trains"
    )
    training = from_rank_0(comm, None if read is None else read.training, "training tokens")
    validation = from_rank_0(comm, None if read is None else read.validation, "validation tokens")
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
) -> _Read:
    with busy("reading text"):
        corpus = read_corpus(recipe.data)
        parts = split(corpus, recipe.data.validation)
    with busy("training the tokenizer"):
        obtained = bpe.obtain(folder, parts.training, recipe.tokenizer.vocabulary)
    with busy("tokenizing"):
        tokenizer = bpe.load(obtained.text)
        streams = bpe.encode(tokenizer, parts.training), bpe.encode(tokenizer, parts.validation)
    rows = [Rows(stream, recipe.data.context) for stream in streams]
    _check_enough(rows, recipe)
    report = Prepared(
        source=corpus.name,
        files=corpus.files,
        nbytes=corpus.nbytes,
        left_out=corpus.left_out,
        capped=corpus.capped,
        documents=(len(parts.training), len(parts.validation)),
        tokens=(len(streams[0]), len(streams[1])),
        rows=(len(rows[0]), len(rows[1])),
        context=recipe.data.context,
        dropped=(rows[0].dropped, rows[1].dropped),
        vocabulary=tokenizer.get_vocab_size(),
        cached=obtained.cached,
        seconds=0.0,
    )
    return _Read(obtained, streams[0], streams[1], report)


def _check_enough(rows: list[Rows], recipe: Recipe) -> None:
    for name, part in zip(("training", "validation"), rows, strict=True):
        if len(part) == 0:
            raise ConfigError(
                f"the {name} split has {len(part.stream)} tokens, fewer than one row of "
                f"data.context {recipe.data.context} + 1; give it more text, or change "
                "data.context or data.validation."
            )
