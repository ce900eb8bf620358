"""Validation: the same rows, weighted by token, at every world size.

A mean of the ranks' mean losses would weigh tokens differently when rows do not divide evenly, and
a rank with one batch fewer would leave the others waiting in a gather. Here every rank makes the
same number of forward passes, padding rows do not count, and sums and counts are added over ranks
before they are divided.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.protocol import Comm
from shardwise.train.batches import IGNORED, Indices, RowSource, evenly_spaced, rank_batches
from shardwise.train.collectives import all_gather_floats
from shardwise.train.language_model import summed
from shardwise.train.records import Evaluated
from shardwise.train.tokenizer import Tokens


def unigram_entropy(tokens: Tokens) -> float:
    """−Σ p log p over the tokens' frequencies p, in nats per token.

    No model that ignores the context has a lower loss on these tokens.
    """
    counts = np.unique(tokens, return_counts=True)[1]
    p = counts / max(1, counts.sum())
    return float(-(p * np.log(p)).sum())


@dataclass(frozen=True)
class Validation:
    """A fixed set of evenly spaced rows of the validation split.

    Attributes:
        rows: the validation split.
        count: number of rows to use.
        micro: rows in a forward pass.
        head: of the model, if it runs only at places that have a target.
    """

    rows: RowSource
    count: int
    micro: int
    head: nn.Module | None = None

    @property
    def indices(self) -> Indices:
        return evenly_spaced(len(self.rows), self.count)

    def entropy(self) -> float:
        """The unigram entropy of the predicted tokens."""
        targets = self.rows.take(self.indices).targets
        return unigram_entropy(targets[targets != IGNORED].numpy())

    def evaluate(self, model: nn.Module, comm: Comm, step: int) -> Evaluated:
        """Loss and accuracy over all rows; the same on every rank. A collective."""
        start = time.perf_counter()
        sums = torch.zeros(3, dtype=torch.float64)
        training = model.training
        model.eval()
        with torch.no_grad():
            for indices in rank_batches(self.indices, self.micro, comm.rank, comm.size):
                batch = self.rows.take(indices).to(comm.device)
                sums += summed(model, batch, _sums, self.head).cpu()
        model.train(training)
        loss, correct, tokens = all_gather_floats(comm, sums.tolist(), "validation").sum(0).tolist()
        return Evaluated(
            step=step,
            loss=loss / tokens,
            accuracy=correct / tokens,
            unigram_entropy=self.entropy(),
            tokens=int(tokens),
            seconds=time.perf_counter() - start,
        )


def _sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed loss, correct predictions and targets."""
    is_target = targets != IGNORED
    loss = F.cross_entropy(logits.float(), targets, reduction="none").double().sum()
    correct = (logits.argmax(-1) == targets) & is_target
    return torch.stack([loss, correct.sum().double(), is_target.sum().double()])
