"""Which rows make which batch: a pure function of the seed and the sample's number.

The ordinary way, a sampler per rank, gives every world size another order, loses the tail of
each epoch, and must save its state to be resumed. Here sample number i of a run is the
same row whatever the world size; a step's batch is a range of numbers, a rank takes its part of
that range, and to resume one needs the step's number alone.

    sample    0  1  2  3 │ 4  5  6  7 │ 8 …        rows = 4, one global batch a column
    world 1   ─── 0 ──── │            │            rank 0 takes all of it
    world 2   ─ 0 ─ ─ 1 ─│            │            each rank half, in micro-batches
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.config import BatchConfig
from shardwise.train.tokenizer import Tokens

__all__ = ["Batches", "MicroBatch", "Rows", "accumulation", "permutation", "share", "spread"]

IGNORED = -100  # a target that does not count, as F.cross_entropy has it

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass.

    Attributes:
        ids: ``[rows, context]`` int64.
        targets: ``[rows, context]`` int64: the id that follows each; ``IGNORED`` in rows that
            only fill up the shape.
    """

    ids: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same, on ``device``."""
        return MicroBatch(self.ids.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Rows:
    """A stream of tokens cut into rows. Every token but the first is a target exactly once.

    Row i reads ``stream[i * context : (i + 1) * context]`` and predicts the same, one later;
    what does not fill a row at the end is dropped.
    """

    stream: Tokens
    context: int

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self.context

    @property
    def dropped(self) -> int:
        """Tokens at the end that are in no row."""
        return len(self.stream) - len(self) * self.context - (len(self) > 0)

    def take(self, indices: Indices) -> MicroBatch:
        """The rows of these indices. A negative one gives row 0 with all targets ignored."""
        starts = np.maximum(indices, 0)[:, None] * self.context
        window = starts + np.arange(self.context + 1)
        tokens = torch.from_numpy(self.stream[window].astype(np.int64))
        targets = tokens[:, 1:].clone()
        targets[torch.from_numpy(indices < 0)] = IGNORED
        return MicroBatch(tokens[:, :-1], targets)


def accumulation(config: BatchConfig, ranks: int) -> int:
    """Micro-batches per rank and step: rows / (micro × ranks).

    Raises:
        ConfigError: that is not a whole number.
    """
    rows, micro = config.rows, config.micro
    if rows % ranks:
        below, above = rows // ranks * ranks, -(-rows // ranks) * ranks
        raise ConfigError(
            f"batch.rows is {rows}, and {ranks} ranks do not divide it; start "
            f"{_divisors_near(rows, ranks)} ranks, or begin a run with batch.rows "
            f"{f'{below} or ' if below else ''}{above}."
        )
    if rows % (micro * ranks):
        raise ConfigError(
            f"batch.rows is {rows}, and batch.micro {micro} × {ranks} rank{'s' * (ranks != 1)} = "
            f"{micro * ranks} does not divide it; use batch.micro "
            f"{_divisors_near(rows // ranks, micro)}."
        )
    return rows // (micro * ranks)


def _divisors_near(whole: int, number: int) -> str:
    """The divisors of ``whole`` next to ``number``, which is none."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < number][-1:]
    above = [n for n in divisors if n > number][:1]
    return " or ".join(map(str, below + above))


def permutation(rows: int, seed: int, epoch: int) -> Indices:
    """The order of ``rows`` rows in an epoch, ``[rows]``.

    Rows are sorted by a hash of (seed, epoch, row) that is written out here, because no
    library promises that its shuffle stays the same from version to version.
    """
    start = _mix(np.array([seed], np.uint64) ^ _mix(np.array([epoch], np.uint64)))
    numbers = np.asarray(start + np.arange(rows, dtype=np.uint64), np.uint64)
    return np.argsort(_mix(numbers), kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al. 2014): each input bit moves about half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Batches:
    """One rank's micro-batches of every step.

    Attributes:
        rows: what there is to draw from.
        config: rows per step and per forward pass.
        seed: of the order.
        rank, ranks: who asks.
    """

    rows: Rows
    config: BatchConfig
    seed: int
    rank: int
    ranks: int
    _orders: dict[int, Indices] = field(default_factory=dict, repr=False)

    @cached_property
    def accumulation(self) -> int:
        return accumulation(self.config, self.ranks)

    def samples(self, first: int, count: int) -> Indices:
        """The rows of samples ``first … first + count``, ``[count]``; the same on every rank."""
        epochs, places = np.divmod(np.arange(first, first + count), len(self.rows))
        out = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._order(int(epoch))[places[here]]
        return out

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            self._orders.clear()  # one epoch's order at a time is enough
            self._orders[epoch] = permutation(len(self.rows), self.seed, epoch)
        return self._orders[epoch]

    def step(self, step: int) -> list[MicroBatch]:
        """This rank's part of step ``step`` (the first is 0), in micro-batches."""
        whole = self.samples(step * self.config.rows, self.config.rows)
        own = np.split(whole, self.ranks)[self.rank]
        return [self.rows.take(piece) for piece in np.split(own, self.accumulation)]


def spread(rows: int, count: int) -> Indices:
    """``count`` rows spread evenly over all, or all of them if there are fewer."""
    count = min(rows, count)
    return np.arange(count) * rows // max(count, 1)


def share(indices: Indices, micro: int, rank: int, ranks: int) -> list[Indices]:
    """One rank's part of ``indices``, in equally many micro-batches of ``micro`` on every rank.

    Where there are too few, -1 stands for a row that does not count: every rank then makes the
    same number of forward passes, which sharded parameters need.
    """
    at_once = micro * ranks
    padding = -len(indices) % at_once
    filled = np.concatenate([indices, np.full(padding, -1, np.int64)])
    return [filled[start + rank * micro :][:micro] for start in range(0, len(filled), at_once)]
