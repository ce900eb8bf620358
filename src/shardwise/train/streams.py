"""Batches of text that is read while the model trains, in a fixed number of streams.

`datasets` splits data over nodes; here it splits them over ``streams``, whatever the number of
ranks. A rank reads the streams that are its own, and a step takes as many rows from each stream. So
no rank has fewer batches than another, which would wait for it, and the global batch is the same at
every number of ranks that divides the streams.

    stream     0    1    2    3       streams = 4: a quarter of a step's rows from each of them
    world 1    ─────── 0 ───────      rank 0 reads all of them
    world 2    ── 0 ──   ── 1 ──      each rank two

A stream is read in windows of ``shuffle`` documents. A window is permuted as a whole, encoded and
cut into rows; tokens that do not fill a row begin the next window. Samples of a window are packed
among themselves. A rolling shuffle buffer would
have to be saved with its content. Here a position is the dataset's at the beginning of the window,
the tokens left over, and the rows taken since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import MicroBatch, Rows, RowSource, accumulation, joined, permutation
from shardwise.train.corpus import is_held_out, readable
from shardwise.train.records import plural
from shardwise.train.samples import window_rows
from shardwise.train.streamed_text import StreamedText
from shardwise.train.tokenizer import Tokens, encode, of_transformers
from shardwise.train.worker import ALONE, Worker

if TYPE_CHECKING:
    from datasets import IterableDataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Position = dict[str, Any]
"""Where a stream is: plain values, for JSON."""

START: Position = {"dataset": None, "epoch": 0, "window": 0, "tokens": [], "row": 0}


def streams_per_rank(recipe: Recipe, ranks: int) -> int:
    """The streams that each rank reads; 0 without streaming.

    Raises:
        ConfigError: the ranks do not divide the streams.
    """
    streams = recipe.data.streaming.streams or 0
    if streams % ranks:
        divisors = [str(n) for n in range(1, streams + 1) if streams % n == 0]
        raise ConfigError(
            f"data.streaming.streams is {streams}, which {ranks} ranks cannot share equally; start "
            f"{' or '.join(divisors[-4:])} ranks, or begin a run with a number of streams that "
            f"{ranks} divides."
        )
    return streams // ranks


@dataclass(frozen=True)
class StreamedRows:
    """The training split: its text, and how it becomes rows."""

    text: StreamedText
    tokenizer: Tokenizer
    recipe: Recipe
    worker: Worker = ALONE

    @property
    def streams(self) -> int:
        return self.recipe.data.streaming.streams or 1

    def dataset(self, number: int) -> IterableDataset:
        """The part of stream ``number``: shards of its own, or else each n-th document of all."""
        from datasets.distributed import split_dataset_by_node

        first = self.worker.number * self.streams
        world = self.worker.workers * self.streams
        return split_dataset_by_node(self.text.dataset, rank=first + number, world_size=world)

    def documents(self, dataset: IterableDataset) -> Iterator[Any]:
        """The texts, or the rows of samples, in ``dataset``."""
        is_text = self.recipe.data.format == "text"
        return self.text.texts(dataset) if is_text else self.text.rows(dataset)

    def rows(self, documents: Sequence[Any], window: int, before: Sequence[int]) -> RowSource:
        """A window's rows.

        Args:
            documents: of the window.
            window: its number.
            before: tokens that are left over from the window before.
        """
        context = self.recipe.data.context
        if self.recipe.data.format == "text":
            tokens = self.tokens(documents, window)
            return Rows(np.concatenate([np.array(before, np.int32), tokens]), context)
        order = permutation(len(documents), self.recipe.run.seed, window)
        shuffled = [documents[index] for index in order]
        return window_rows(shuffled, self._of_transformers, self.recipe.data)

    @cached_property
    def _of_transformers(self) -> PreTrainedTokenizerBase:
        added = self.recipe.adapter.new_tokens
        return of_transformers(self.tokenizer.to_str(), self.recipe.tokenizer, added)

    def tokens(self, texts: Sequence[str], window: int) -> Tokens:
        """The documents that are not held out, permuted and encoded, as one stream."""
        share = self.recipe.data.validation
        training = [text for text in texts if text.strip() and not is_held_out(text, share)]
        order = permutation(len(training), self.recipe.run.seed, window)
        end = self.recipe.tokenizer.end
        return encode(self.tokenizer, [training[index] for index in order], end)


class Window(NamedTuple):
    """Rows that were read together, and the position of the first of them."""

    rows: RowSource
    position: Position


class Stream:
    """The rows of one stream, in order. The next window is read in the background."""

    def __init__(
        self, source: StreamedRows, number: int, reader: Executor, position: Position
    ) -> None:
        self._source, self._number, self._reader = source, number, reader
        self._first, self._row = position, int(position["row"])
        self._windows: deque[Window] = deque()
        self._reading = self._read_windows()
        self._next = reader.submit(next, self._reading, None)

    def has(self, rows: int) -> bool:
        """Are there ``rows`` more? Waits until they are read."""
        while sum(len(window.rows) for window in self._windows) - self._row < rows:
            window = self._next.result()
            if window is None:
                return False
            self._windows.append(window)
            self._next = self._reader.submit(next, self._reading, None)
        return True

    def take(self, number: int) -> list[MicroBatch]:
        """The next ``number`` rows, if ``has`` says that they are there, in parts of one window."""
        is_there = self.has(number)
        assert is_there
        parts, missing = list[MicroBatch](), number
        while missing:
            rows = self._windows[0].rows
            size = min(missing, len(rows) - self._row)
            if size:
                parts.append(rows.take(np.arange(self._row, self._row + size)))
            self._row, missing = self._row + size, missing - size
            if missing:
                self._windows.popleft()
                self._row = 0
        return parts

    @property
    def position(self) -> Position:
        """Return the position from which a stream continues after the last row that was taken."""
        position = self._windows[0].position if self._windows else self._first
        return position | {"row": self._row}

    def _read_windows(self) -> Iterator[Window]:
        """The windows from the first position on, through all epochs; in the reader's thread."""
        position, data = self._first, self._source.recipe.data
        with readable(data.source):
            while position["epoch"] < (data.streaming.epochs or math.inf):
                dataset, tokens = self._source.dataset(self._number), 0
                is_whole = position["dataset"] is None
                if position["dataset"] is not None:
                    dataset.load_state_dict(position["dataset"])
                all_documents = self._source.documents(dataset)
                while documents := list(islice(all_documents, data.streaming.shuffle)):
                    window = self._window(documents, position)
                    yield window
                    tokens += len(window.rows.arrays[0])
                    position = self._after(window, dataset.state_dict())
                if is_whole and not tokens:
                    raise self._without_text()
                position = position | {"dataset": None, "epoch": position["epoch"] + 1}

    def _window(self, documents: Sequence[Any], position: Position) -> Window:
        # A number of its own for each window of each stream.
        seed = position["window"] * self._source.streams + self._number
        rows = self._source.rows(documents, seed, position["tokens"])
        return Window(rows, position | {"row": 0})

    def _after(self, window: Window, dataset: Mapping[str, Any]) -> Position:
        rows, position = window
        tail = rows.stream[len(rows) * rows.context :].tolist() if isinstance(rows, Rows) else []
        return position | {
            "dataset": dict(dataset),
            "window": position["window"] + 1,
            "tokens": tail,
        }

    def _without_text(self) -> ConfigError:
        text, streams = self._source.text, self._source.streams
        return ConfigError(
            f"data.source {text.config.source}: stream {self._number} of {streams} has no text to "
            f"train on ({plural(text.shards, 'shard')}); use fewer data.streaming.streams."
        )


class StreamBatches:
    """One rank's micro-batches, from the streams that are its own.

    Args:
        source: the training split.
        rank, ranks: of this process.
    """

    def __init__(self, source: StreamedRows, rank: int, ranks: int) -> None:
        own = streams_per_rank(source.recipe, ranks)
        self.rank = rank
        self.accumulation = accumulation(source.recipe.batch, ranks)
        self._source, self._numbers = source, range(rank * own, (rank + 1) * own)
        self._rows = source.recipe.batch.rows // source.streams  # of each stream in a step
        self._reader = ThreadPoolExecutor(1, "shardwise-text")
        self._streams: list[Stream] = []

    def start(self, positions: Sequence[Position]) -> None:
        """Begin to read.

        Args:
            positions: of all streams, those of other ranks as well; none = their beginning.
        """
        positions = positions or [START] * self._source.streams
        self._streams = [
            Stream(self._source, number, self._reader, positions[number])
            for number in self._numbers
        ]

    def step(self, _step: int) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        parts = [part for stream in self._streams for part in stream.take(self._rows)]
        return joined(parts).split(self.accumulation)

    def targets(self, _step: int) -> int | None:
        """Tokens that all ranks train on in a step; of samples a rank knows its own only: None."""
        recipe = self._source.recipe
        return recipe.batch.rows * recipe.data.context if recipe.data.format == "text" else None

    def ended(self) -> bool:
        """Has one of this rank's streams fewer rows left than a step takes of it?"""
        return not all(stream.has(self._rows) for stream in self._streams)

    def positions(self) -> list[Position]:
        """Return the positions of this rank's streams."""
        return [stream.position for stream in self._streams]

    def close(self) -> None:
        """Read no more."""
        self._reader.shutdown(cancel_futures=True)
