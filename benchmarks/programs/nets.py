"""Small models and global batches, the same from the same seed in every process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROWS = 12  # of a global batch: 1, 2, 3 and 4 ranks get equal parts


class Block(nn.Module):
    """A residual block of width ``width``; it is one unit under both engines."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """``[B, inputs] → [B, outputs]`` through ``depth`` blocks."""

    def __init__(self, inputs: int = 7, outputs: int = 3, depth: int = 3, width: int = 12) -> None:
        super().__init__()
        self.inp = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(x)
        return out


class LanguageModel(nn.Module):
    """``[B, T] → [B, T, vocabulary]``; ``head`` is "own", "tied", or "read" from the embedding."""

    def __init__(self, head: str = "own", vocabulary: int = 29, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = None if head == "read" else nn.Linear(width, vocabulary, bias=False)
        if self.head is not None and head == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        out: Tensor = x @ self.embed.weight.T if self.head is None else self.head(x)
        return out


def batches(steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Global batches: inputs ``[12, 7]`` and targets ``[12, 3]``."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(ROWS, 7, generator=generator), torch.randn(ROWS, 3, generator=generator))
        for _ in range(steps)
    ]


def token_batches(steps: int = 4) -> list[tuple[Tensor]]:
    """Global batches of tokens, ``[12, 6]``."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(0, 29, (ROWS, 6), generator=generator),) for _ in range(steps)]


def language_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of the token that follows each."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
