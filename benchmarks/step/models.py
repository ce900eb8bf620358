"""What is trained: five models, each with its data and its loss.

A task is looked up by name, because ranks are processes and a name travels. Data are random:
what is measured does not depend on them, and every engine gets the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Batch, decoder_config, next_token_loss, token_batch
from shardwise.train.decoder import Decoder

VOCABULARY = 8_192
CLASSES = 100


@dataclass(frozen=True)
class Task:
    """A model with its data."""

    summary: str  # one line for the table
    build: Callable[[], nn.Module]  # a new model, from torch's generator
    # inputs and targets of one rank and step, from a generator
    batch: Callable[[torch.Generator], Batch]
    # of a model, or of what an engine made of it, on a batch; 0-dim
    loss: Callable[[nn.Module, Batch], Tensor]


def decoder(tokens: int, layers: int = 8, width: int = 512, vocabulary: int = VOCABULARY) -> Task:
    """A Llama-shaped decoder, batch 2."""
    config = decoder_config(width, layers)
    return Task(
        f"decoder, {layers} layers, width {width}, vocabulary {vocabulary:,}, 2 × {tokens} tokens",
        lambda: Decoder(config, vocabulary, tokens),
        lambda generator: token_batch(generator, vocabulary, 2, tokens),
        next_token_loss,
    )


# ---- many small parameters -----------------------------------------------------------------


class Ladder(nn.Module):
    """Twenty small maps one after the other: 40 parameters in one unit."""

    def __init__(self, width: int, rungs: int) -> None:
        super().__init__()
        self.rungs = nn.ModuleList(nn.Linear(width, width) for _ in range(rungs))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` → the same."""
        for rung in self.rungs:
            x = x + torch.tanh(rung(x))
        return x


def small() -> Task:
    """320 parameters, 270 thousand elements: what a step costs besides its bytes."""

    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(8, 40, generator=generator), torch.randn(8, 40, generator=generator)

    return Task(
        "8 × 40 small parameters (40 × 40), batch 8",
        lambda: nn.Sequential(*(Ladder(40, 20) for _ in range(8))),
        batch,
        lambda model, pair: F.mse_loss(model(pair[0]), pair[1]),
    )


# ---- convolutions --------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions around a skip, group norms before them (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.ReLU(), _conv(channels, channels))
        self.second = nn.Sequential(nn.GroupNorm(8, channels), nn.ReLU(), _conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` → the same."""
        out: Tensor = x + self.second(self.first(x))
        return out


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def convolutions() -> Task:
    """A residual network of 8 blocks, 6 M parameters, on 32 × 32 images."""

    def build() -> nn.Module:
        narrow = nn.Sequential(*(Residual(128) for _ in range(4)))
        wide = nn.Sequential(*(Residual(256) for _ in range(4)))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))
        return nn.Sequential(_conv(3, 128, stride=2), narrow, _conv(128, 256, stride=2), wide, pool)

    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(4, 3, 32, 32, generator=generator)
        return images, torch.randint(CLASSES, (4,), generator=generator)

    return Task(
        "residual network, 8 blocks, 4 images of 32 × 32",
        build,
        batch,
        lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]),
    )


# ---- mostly frozen -------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear map with a trained one of low rank beside it (Hu et al. 2021, LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        # LoRA starts at zero; here every adapter shall have a gradient in the first step.
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """As the frozen map."""
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def adapters(tokens: int) -> Task:
    """The decoder, frozen, with adapters of rank 8 on each projection of its blocks."""
    whole = decoder(tokens)

    def build() -> nn.Module:
        model = whole.build().requires_grad_(requires_grad=False)
        linear = [(m, n, c) for m in model.modules() for n, c in m.named_children()]
        for parent, name, child in linear:
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Adapted(child, rank=8))
        return model

    return Task(f"frozen, adapters of rank 8: {whole.summary}", build, whole.batch, whole.loss)


TASKS: dict[str, Task] = {
    "decoder128": decoder(128),
    "decoder32": decoder(32),
    "small": small(),
    "conv": convolutions(),
    "lora": adapters(32),
    "tiny": decoder(8, layers=2, width=32, vocabulary=64),
}
