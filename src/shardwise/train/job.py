"""The sharded model with its optimizer and batches, and one training step.

The loss of a micro-batch is its *sum* over the tokens that are trained on, scaled so that gradients
are the mean over all of these in the global batch, however it is divided. A mean of the
micro-batches' means would give 1×4×1, 2×2×1 and 2×1×2 (micro × accumulation × ranks) different
losses whenever micro-batches have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardwise.api.sharded import Sharded
from shardwise.comm.protocol import Comm
from shardwise.hf.labelled import head_of, why_all_logits
from shardwise.optim.average import EMA
from shardwise.recipe.recipe import Recipe
from shardwise.train import language_model
from shardwise.train.ahead import BatchesAhead
from shardwise.train.batches import IGNORED, Batches, MicroBatch, RowSource
from shardwise.train.collectives import all_gather_floats
from shardwise.train.learning_rate import learning_rate
from shardwise.train.optimizer import optimizer_of
from shardwise.train.streams import StreamBatches, StreamedRows
from shardwise.train.worker import worker_of


@dataclass(frozen=True)
class Job:
    """One rank's part of a training run."""

    recipe: Recipe
    model: nn.Module
    sharded: Sharded
    optimizer: torch.optim.Optimizer
    batches: Batches | StreamBatches
    scaler: torch.amp.GradScaler  # of the loss; does nothing where it is not enabled
    ema: EMA | None = None
    report: str = ""  # of a model that was read: what of the files, and of an adapter's targets

    @cached_property
    def ahead(self) -> BatchesAhead:
        """The batches, of which the next step's are prepared while a step computes."""
        return BatchesAhead(self.batches, self.sharded.comm.device)

    @cached_property
    def all_logits(self) -> str:
        """The reason for computing all logits; ``""``: only those of places with a target."""
        wants_all = self.recipe.batch.logits == "all"
        return "batch.logits is all" if wants_all else why_all_logits(self.sharded)

    @property
    def head(self) -> nn.Module | None:
        """The model's head, if it runs only at places that have a target."""
        return None if self.all_logits else head_of(self.model)

    @property
    def tokens_per_step(self) -> int:
        """At most: rows that are not packed are as long as the longest of a micro-batch."""
        return self.recipe.batch.rows * self.recipe.data.context

    def forward_backward(self, step: int) -> Tensor:
        """Forward and backward of step ``step``, with reduction of the gradients.

        Returns:
            This rank's share of the mean loss, which is the sum over ranks: 0-dim, on the device,
            which need not have come to it. Gradients are unscaled.
        """
        batches = self.ahead.take(step)
        targets = self._targets(step, batches.in_host) or 1
        rank_loss = torch.zeros((), device=self.sharded.comm.device)
        pairs = zip(batches.on_device, batches.in_host, strict=True)
        for number, (batch, in_host) in enumerate(pairs, start=1):
            is_last = number == len(batches.on_device)
            with self.sharded.accumulate(is_last or self.recipe.sharding.sync_each_micro_batch):
                loss = self._loss(batch, in_host) / targets
                # The engine averages over ranks, and the ranks' losses are to be summed.
                self.scaler.scale(loss * self.sharded.comm.size).backward()
                rank_loss += loss.detach()
                del loss  # nodes of its graph would lie between the next one's blocks of the heap
        self.scaler.unscale_(self.optimizer)
        self.ahead.prepare(step + 1)
        return rank_loss

    def _targets(self, step: int, own: Sequence[MicroBatch]) -> int:
        """Tokens that all ranks train on in a step."""
        targets = self.batches.targets(step)
        if targets is not None:
            return targets
        count = sum(int((batch.targets != IGNORED).sum()) for batch in own)
        return int(all_gather_floats(self.sharded.comm, [count], "tokens to train on").sum())

    def clip_and_set_lr(self, step: int) -> tuple[Tensor, float]:
        """Clip the gradients of step ``step``, and set its learning rate.

        Returns:
            The gradient norm before clipping, 0-dim, on the device, and the learning rate.
        """
        norm = self.sharded.clip_grad_norm_(self.recipe.optimizer.clip)
        lr = learning_rate(step, self.recipe.run.steps, self.recipe.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return norm, lr

    def update(self) -> None:
        """Update the parameters; with a loss scale only if no rank's gradients overflowed."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update()

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the parameters by their moving averages in the block, if the recipe has any."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def _loss(self, batch: MicroBatch, in_host: MicroBatch) -> Tensor:
        """The sum over the tokens that are trained on."""
        has_ignored = bool((in_host.targets == IGNORED).any())  # the device would be waited for
        ignored = IGNORED if has_ignored else None
        return language_model.summed_loss(self.model, batch, self.head, ignored)


def build(recipe: Recipe, comm: Comm, rows: RowSource | StreamedRows, vocabulary: int) -> Job:
    """Build the sharded model, its optimizer and its batches. A collective."""
    sharded, report = language_model.build(recipe, comm, vocabulary)
    optimizer = optimizer_of(sharded, recipe.optimizer)
    scaler, batches = _scaler(recipe, comm.device.type), _batches(rows, recipe, comm)
    decay = recipe.optimizer.ema
    ema = None if decay is None else EMA(optimizer, decay)
    return Job(recipe, sharded.model, sharded, optimizer, batches, scaler, ema, report)


def _scaler(recipe: Recipe, device: str) -> torch.amp.GradScaler:
    """Make a scaler with the recipe's first scale: gradients of float16 underflow without."""
    scale = recipe.optimizer.loss_scale
    if scale is None:
        scale = 2.0**16 if recipe.sharding.precision.param_dtype == "float16" else 0.0
    return torch.amp.GradScaler(device, init_scale=scale or 1.0, enabled=scale > 0)


def _batches(rows: RowSource | StreamedRows, recipe: Recipe, comm: Comm) -> Batches | StreamBatches:
    if isinstance(rows, StreamedRows):
        return StreamBatches(rows, comm.rank, comm.size)
    worker = worker_of(recipe.outer)
    return Batches(rows, recipe.batch, recipe.run.seed, comm.rank, comm.size, worker)
