"""Samples of different lengths in rows of one length, without attention between them.

Padding every sample to the longest would waste most of a row. Here several samples share one:
positions begin again at 0 with each of them, and a token attends to its own segment only. So
the loss is the one that each sample would have in a row of its own.

    ids         A0 A1 A2 A3 B0 B1 B2  ·      "·" is padding, a segment of its own
    targets     –  A2 A3 –  B1 B2 –   –      "–" is ignored; here A0 A1 are the prompt
    positions   0  1  2  3  0  1  2   0
    segments    0  0  0  0  1  1  1   2

Padding is on the right and its targets are ignored by their place, never by their id: with pad =
eos, as many tokenizers have it, a mask by id would keep a model from learning where to stop.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.train.batches import IGNORED, Indices, MicroBatch
from shardwise.train.tokenizer import Tokens

PADDING_ID = 0


@dataclass(frozen=True)
class Examples:
    """Tokenised samples, one after the other.

    Attributes:
        ids: ``[tokens]`` int32.
        trained: ``[tokens]`` bool, which of them are trained on.
        lengths: ``[samples]`` int64; a sample has at least one token.
    """

    ids: Tokens
    trained: NDArray[np.bool_]
    lengths: Indices

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.ids, self.trained, self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> Indices:
        """First index of each sample, ``[samples]``."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def targets(self) -> Indices:
        """Tokens of each sample that are trained on, ``[samples]``; nothing predicts the first."""
        before: Indices = np.append(0, np.cumsum(self.trained))
        targets: Indices = before[self.starts + self.lengths] - before[self.starts + 1]
        return targets


def pack(lengths: Sequence[int] | Indices, context: int) -> list[Indices]:
    """Samples to rows of ``context`` tokens, by best-fit decreasing: the samples of each row.

    The longest sample is placed first, each into the row with the least space that holds it.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), in order
    for sample in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[sample])
        place = bisect_left(space, (length, -1))
        if place == len(space):
            free, row = context, len(rows)
            rows.append([])
        else:
            free, row = space.pop(place)
        rows[row].append(sample)
        insort(space, (free - length, row))
    return [np.array(row) for row in rows]


@dataclass(frozen=True)
class SampleRows:
    """Samples in rows.

    Attributes:
        examples: of at most ``context`` tokens each.
        context: tokens in a row.
        packed: several samples share a row. Otherwise each has its own, and the rows of a
            micro-batch are as long as the longest of them.
    """

    examples: Examples
    context: int
    packed: bool = True

    @cached_property
    def groups(self) -> Sequence[Indices]:
        """The samples of each row."""
        if self.packed:
            return pack(self.examples.lengths, self.context)
        return np.arange(len(self.examples))[:, None]  # type: ignore[return-value]

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.examples.arrays

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def dropped(self) -> int:
        """Places of all rows, at their full length, that no sample fills."""
        return len(self) * self.context - len(self.examples.ids)

    def targets(self, indices: Indices) -> int:
        """The number of tokens in these rows that are trained on."""
        return sum(int(self.examples.targets[self.groups[index]].sum()) for index in indices)

    def take(self, indices: Indices) -> MicroBatch:
        """The rows at ``indices``; a negative index gives a row whose targets are all ignored."""
        rows = [self._row(self.groups[index]) for index in np.maximum(indices, 0)]
        length = self.context if self.packed else max(row.shape[1] for row in rows)
        padded = np.stack([_padded(row, length) for row in rows])
        ids, targets, positions, segments = torch.from_numpy(padded).unbind(1)
        targets[torch.from_numpy(indices < 0)] = IGNORED
        if not self.packed:  # attention is causal, so no token sees the padding behind it
            return MicroBatch(ids, targets)
        return MicroBatch(ids, targets, positions, segments)

    def _row(self, group: Indices) -> NDArray[np.int64]:
        parts = [self._sample(sample, segment) for segment, sample in enumerate(group)]
        return np.concatenate(parts, axis=1)

    def _sample(self, sample: int, segment: int) -> NDArray[np.int64]:
        """Ids, targets, positions and segments of one sample, ``[4, tokens]``."""
        start, length = self.examples.starts[sample], self.examples.lengths[sample]
        ids = self.examples.ids[start : start + length].astype(np.int64)
        trained = self.examples.trained[start : start + length]
        targets = np.append(np.where(trained, ids, IGNORED)[1:], IGNORED)
        return np.stack([ids, targets, np.arange(length), np.full(length, segment)])


def _padded(row: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """``[4, tokens] → [4, length]``; what is added is a segment of its own."""
    missing = length - row.shape[1]
    empty = np.full(missing, PADDING_ID), np.full(missing, IGNORED)
    padding = np.stack([*empty, np.arange(missing), np.full(missing, row[3, -1] + 1)])
    return np.concatenate([row, padding], axis=1)
