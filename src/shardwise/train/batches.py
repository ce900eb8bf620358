"""The rows of each batch: a pure function of the seed and the sample's index.

A sampler per rank would give every world size another order, drop the tail of each epoch, and
need its state saved to resume. Here sample i of a run is the same row at every world size. The
batch of a step is a range of samples, each rank takes its part of the range, and resuming needs
only the step.

    sample    0  1  2  3 │ 4  5  6  7 │ 8 …        rows = 4, one global batch a column
    world 1   ─── 0 ──── │            │            rank 0 takes all of it
    world 2   ─ 0 ─ ─ 1 ─│            │            each rank half, in micro-batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.recipe.data_config import BatchConfig
from shardwise.train.tokenizer import Tokens
from shardwise.train.worker import ALONE, Worker

IGNORED = -100  # ignore_index of F.cross_entropy

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass.

    Attributes:
        ids: ``[rows, context]`` int64.
        targets: ``[rows, context]`` int64, the id that follows each; ``IGNORED`` where nothing is
            trained on.
        positions: ``[rows, context]`` int64, the place of each token in its own sample.
        segments: ``[rows, context]`` int64, which sample of the row it belongs to; a token attends
            to its own sample only. ``None``, as positions: the row is one sample.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same, on ``device``; where it is an accelerator, the host does not wait for it."""
        if device.type == "cpu":
            return self
        moved = self.empty(device)
        moved.copy_(self)
        return moved

    def empty(self, device: torch.device) -> MicroBatch:
        """Memory for the same on ``device``."""
        tensors = (t for t in self.tensors if t is not None)
        return MicroBatch(*(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors))

    def copy_(self, source: MicroBatch) -> None:
        """Copy ``source``, which is in host memory, and do not wait."""
        for out, tensor in zip(self.tensors, source.tensors, strict=True):
            if out is not None:
                out.copy_(tensor.pin_memory(), non_blocking=True)

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.ids, self.targets, self.positions, self.segments

    def split(self, parts: int) -> list[MicroBatch]:
        """The rows in ``parts`` equal parts."""
        chunks = ([None] * parts if t is None else t.chunk(parts) for t in self.tensors)
        return [MicroBatch(*tensors) for tensors in zip(*chunks, strict=True)]


def joined(batches: Sequence[MicroBatch]) -> MicroBatch:
    """The rows of all ``batches``; without packing they may differ in length, and are padded."""
    length = max(batch.ids.shape[1] for batch in batches)
    columns = zip(*(batch.tensors for batch in batches), strict=True)
    fills = (0, IGNORED, 0, 0)
    tensors: list[Any] = [
        None
        if column[0] is None
        else torch.cat([F.pad(t, (0, length - t.shape[1]), value=fill) for t in column])
        for column, fill in zip(columns, fills, strict=True)
    ]
    return MicroBatch(*tensors)


class RowSource(Protocol):
    """A split as rows of tokens."""

    @property
    def context(self) -> int:
        """Tokens in a row."""

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays of the rows: the tokens first."""

    @property
    def dropped(self) -> int:
        """Tokens at the end that are in no row; of samples, the places that none fills."""

    def __len__(self) -> int: ...

    def take(self, indices: Indices) -> MicroBatch:
        """The rows at ``indices``; a negative index gives a row whose targets are all ignored."""

    def targets(self, indices: Indices) -> int:
        """The number of tokens in these rows that are trained on."""


@dataclass(frozen=True)
class Rows:
    """A stream of tokens cut into rows. Every token but the first is a target exactly once.

    Row i reads ``stream[i * context : (i + 1) * context]`` and predicts the same shifted by one.
    Tokens at the end that do not fill a row are dropped.

    Attributes:
        stream: ``[tokens]`` int32.
        context: tokens in a row.
        trained: ``[tokens]`` bool, which of them are targets; ``None`` = all.
    """

    stream: Tokens
    context: int
    trained: NDArray[np.bool_] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.stream,) if self.trained is None else (self.stream, self.trained)

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self.context

    @property
    def dropped(self) -> int:
        """Tokens at the end that are in no row."""
        return len(self.stream) - len(self) * self.context - (len(self) > 0)

    def take(self, indices: Indices) -> MicroBatch:
        """The rows at ``indices``; a negative index gives a row whose targets are all ignored."""
        window = self._window(indices)
        tokens = torch.from_numpy(self.stream[window].astype(np.int64))
        targets = tokens[:, 1:].clone()
        if self.trained is not None:
            targets[torch.from_numpy(~self.trained[window[:, 1:]])] = IGNORED
        targets[torch.from_numpy(indices < 0)] = IGNORED
        return MicroBatch(tokens[:, :-1], targets)

    def targets(self, indices: Indices) -> int:
        """The number of tokens in these rows that are trained on."""
        if self.trained is None:
            return len(indices) * self.context
        return int(self.trained[self._window(indices)[:, 1:]].sum())

    def _window(self, indices: Indices) -> Indices:
        """``[rows, context + 1]``: where the tokens of each row are in the stream."""
        return np.maximum(indices, 0)[:, None] * self.context + np.arange(self.context + 1)


def accumulation(config: BatchConfig, ranks: int) -> int:
    """Micro-batches per rank and step: rows / (micro × ranks).

    Raises:
        ConfigError: the result is not a whole number.
    """
    rows, micro = config.rows, config.micro
    if rows % ranks:
        below, above = rows // ranks * ranks, -(-rows // ranks) * ranks
        raise ConfigError(
            f"batch.rows is {rows}, which is not divisible by {ranks} ranks; start "
            f"{_divisors_near(rows, ranks)} ranks, or begin a run with batch.rows "
            f"{f'{below} or ' if below else ''}{above}."
        )
    if rows % (micro * ranks):
        raise ConfigError(
            f"batch.rows is {rows}, which is not divisible by batch.micro {micro} × {ranks} "
            f"rank{'s' * (ranks != 1)} = {micro * ranks}; use batch.micro "
            f"{_divisors_near(rows // ranks, micro)}."
        )
    return rows // (micro * ranks)


def _divisors_near(total: int, number: int) -> str:
    """The divisors of ``total`` nearest to ``number``, which is not one."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < number][-1:]
    above = [n for n in divisors if n > number][:1]
    return " or ".join(map(str, below + above))


def permutation(rows: int, seed: int, epoch: int) -> Indices:
    """The order of ``rows`` rows in an epoch, ``[rows]``.

    Rows are sorted by a hash of (seed, epoch, row), because no library promises that its shuffle
    stays the same from version to version.
    """
    start = _splitmix64(np.array([seed], np.uint64) ^ _splitmix64(np.array([epoch], np.uint64)))
    numbers = np.asarray(start + np.arange(rows, dtype=np.uint64), np.uint64)
    return np.argsort(_splitmix64(numbers), kind="stable")


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al. 2014): each input bit moves about half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Batches:
    """One rank's micro-batches of every step.

    Attributes:
        rows: the training split.
        config: rows per step and per forward pass.
        seed: of the order.
        rank, ranks: of this process.
        worker: one of several that train apart; each takes rows of its own.
    """

    rows: RowSource
    config: BatchConfig
    seed: int
    rank: int
    ranks: int
    worker: Worker = ALONE
    _permutations: dict[int, Indices] = field(default_factory=dict, repr=False)

    @cached_property
    def accumulation(self) -> int:
        return accumulation(self.config, self.ranks)

    def samples(self, first: int, count: int) -> Indices:
        """Row indices of ``count`` samples from ``first``, ``[count]``; the same on every rank."""
        epochs, positions = np.divmod(np.arange(first, first + count), len(self.rows))
        indices = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            indices[in_epoch] = self._permutation(int(epoch))[positions[in_epoch]]
        return indices

    def _permutation(self, epoch: int) -> Indices:
        if epoch not in self._permutations:
            self._permutations.clear()  # keep one epoch's order only
            self._permutations[epoch] = permutation(len(self.rows), self.seed, epoch)
        return self._permutations[epoch]

    def start(self, positions: Sequence[object]) -> None:
        """Nothing: all rows are here, and the step says which."""

    def ended(self) -> bool:
        """False: after the last row comes the first again."""
        return False

    def positions(self) -> list[dict[str, object]]:
        """None, for the same reason."""
        return []

    def close(self) -> None:
        """Nothing."""

    def step(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of step ``step``, counted from 0."""
        indices = self._of_step(step)
        rank_indices = np.split(indices, self.ranks)[self.rank]
        return [self.rows.take(batch) for batch in np.split(rank_indices, self.accumulation)]

    def targets(self, step: int) -> int:
        """Tokens that all ranks train on in step ``step``; each rank can count them."""
        return self.rows.targets(self._of_step(step))

    def _of_step(self, step: int) -> Indices:
        batch = step * self.worker.workers + self.worker.number
        return self.samples(batch * self.config.rows, self.config.rows)


def evenly_spaced(rows: int, count: int) -> Indices:
    """``count`` evenly spaced row indices of ``rows``, or all if there are fewer."""
    count = min(rows, count)
    return np.arange(count) * rows // max(count, 1)


def rank_batches(indices: Indices, micro: int, rank: int, ranks: int) -> list[Indices]:
    """One rank's part of ``indices``, in micro-batches of ``micro``.

    Padding rows are -1: they give every rank the same number of forward passes, which sharded
    parameters need.
    """
    global_batch = micro * ranks
    padding = -len(indices) % global_batch
    padded = np.concatenate([indices, np.full(padding, -1, np.int64)])
    return [padded[start + rank * micro :][:micro] for start in range(0, len(padded), global_batch)]
