"""The models of the cases, and a training loop that is the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from benchmarks.scorecard.engines import Engine

WIDTH = 12
STEPS = 3
Values = dict[str, Tensor]
Loss = Callable[[Any, int, int], Tensor]
"""Of a model, on the batch of a rank in a step; 0-dim."""


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Blocks; ``change`` makes it the model of a case."""

    def __init__(self, change: Callable[[Net], object] = lambda _: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Language(nn.Module):
    """31 tokens, so that no number of ranks divides them; its head is its embedding if tied."""

    def __init__(self, tied: bool, tokens: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, tokens, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((10 * x).long().abs().sum(1) % 31)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def batch(rank: int, step: int) -> Tensor:
    """float32, [4, WIDTH]; no two are alike."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    out: Tensor = model(batch(rank, step))
    return F.mse_loss(out.float(), torch.ones(out.shape))


def seeded(build: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return build()


def train(
    engine: Engine,
    model: nn.Module,
    loss: Loss = squares,
    optimizer: Optimizer | None = None,
    steps: range = range(STEPS),
    before_update: Callable[[], object] = lambda: None,
) -> Values:
    """Train by mean gradients over the ranks, and return the whole values."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        for rank in engine.ranks:
            (loss(model, rank, step) / len(engine.ranks)).backward()
        before_update()
        optimizer.step()
        optimizer.zero_grad()
    return engine.whole(model)
