"""What is trained: models, each with its data and its loss.

A task is looked up by name, because ranks are processes and a name travels. Data are random:
what is measured does not depend on them, and every engine gets the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Batch, Loss, decoder_config, next_token_loss, token_batch
from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Block, Decoder, Rotary


@dataclass(frozen=True)
class Task:
    """A model with its data."""

    summary: str  # one line for the table
    build: Callable[[], nn.Module]  # a new model, from torch's generator
    # inputs and targets of one rank and step, from a generator
    batch: Callable[[torch.Generator], Batch]
    loss: Loss


def decoder(config: ModelConfig, vocabulary: int, tokens: int, rows: int = 2) -> Task:
    """A Llama-shaped decoder."""
    return Task(
        f"decoder, {config.layers} layers, width {config.width}, vocabulary {vocabulary:,}, "
        f"{rows} × {tokens} tokens",
        lambda: Decoder(config, vocabulary, tokens),
        lambda generator: token_batch(generator, vocabulary, rows, tokens),
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


#: 320 parameters, 270 thousand elements: what a step costs besides its bytes.
SMALL = Task(
    "8 × 40 small parameters (40 × 40), batch 8",
    lambda: nn.Sequential(*(Ladder(40, 20) for _ in range(8))),
    lambda g: (torch.randn(8, 40, generator=g), torch.randn(8, 40, generator=g)),
    lambda model, pair: F.mse_loss(model(pair[0]), pair[1]),
)


# ---- few large parameters ------------------------------------------------------------------


class FeedForward(nn.Module):
    """Two matrices around a ReLU, with a skip."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` → the same."""
        out: Tensor = x + self.down(F.relu(self.up(x)))
        return out


def feed_forward(layers: int, width: int, hidden: int, rows: int) -> Task:
    """Large matrices and short activations: memory is what the parameters need, and the engine."""
    return Task(
        f"{layers} feed-forward blocks of {width:,} × {hidden:,}, batch {rows}",
        lambda: nn.Sequential(*(FeedForward(width, hidden) for _ in range(layers))),
        lambda g: (torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)),
        lambda model, pair: F.mse_loss(model(pair[0]), pair[1]),
    )


# ---- convolutions --------------------------------------------------------------------------

CLASSES = 100


class Residual(nn.Module):
    """Two convolutions around a skip, group norms before them (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.GroupNorm(8, channels), nn.ReLU(), _conv(channels, channels))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` → the same."""
        out: Tensor = x + self.second(self.first(x))
        return out


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _residual_network() -> nn.Module:
    """8 blocks, 6 M parameters."""
    narrow = nn.Sequential(*(Residual(128) for _ in range(4)))
    wide = nn.Sequential(*(Residual(256) for _ in range(4)))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))
    return nn.Sequential(_conv(3, 128, stride=2), narrow, _conv(128, 256, stride=2), wide, pool)


CONVOLUTIONS = Task(
    "residual network, 8 blocks, 4 images of 32 × 32",
    _residual_network,
    lambda g: (torch.randn(4, 3, 32, 32, generator=g), torch.randint(CLASSES, (4,), generator=g)),
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
        """The output of the frozen map, and the adapter's."""
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def adapters(whole: Task) -> Task:
    """A decoder, frozen, with adapters of rank 8 on each projection of its blocks."""

    def build() -> nn.Module:
        model = whole.build().requires_grad_(requires_grad=False)
        linear = [(m, n, c) for m in model.modules() for n, c in m.named_children()]
        for parent, name, child in linear:
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Adapted(child, rank=8))
        return model

    return Task(f"frozen, adapters of rank 8: {whole.summary}", build, whole.batch, whole.loss)


# ---- for a GPU -----------------------------------------------------------------------------


class Stack(nn.Module):
    """What lies between an embedding and a head: blocks, and their table of positions."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.rotary_emb = Rotary(tokens, config.head_size, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, tokens, width]`` → the same."""
        angles = self.rotary_emb(x.shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        return x


def blocks(config: ModelConfig, tokens: int) -> Task:
    """A decoder's blocks alone, on hidden states in bf16."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch[0].detach().requires_grad_())
        return out.float().square().mean()

    return Task(
        f"{config.layers} blocks of width {config.width:,}, no embedding or head, 1 × {tokens:,} "
        "tokens",
        lambda: Stack(config, tokens),
        lambda g: (torch.randn(1, tokens, config.width, generator=g).bfloat16(),),
        loss,
    )


def shape(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> ModelConfig:
    """Embedding and head are not tied: tied ones are gathered by rules that differ."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    return ModelConfig(width=width, layers=layers, tied=False, **sizes)


ON_CPU: dict[str, Task] = {
    "decoder128": decoder(decoder_config(512, 8), 8_192, 128),
    "decoder32": decoder(decoder_config(512, 8), 8_192, 32),
    "small": SMALL,
    "blocks400m": feed_forward(12, 2_048, 8_192, rows=64),
    "blocks670m": feed_forward(20, 2_048, 8_192, rows=64),
    "conv": CONVOLUTIONS,
    "lora": adapters(decoder(decoder_config(512, 8), 8_192, 32)),
    "tiny": decoder(decoder_config(32, 2), 64, 8),
}
ON_GPU: dict[str, Task] = {
    # Llama 3 8B's blocks (Grattafiori et al. 2024, arXiv 2407.21783), 218 M parameters each
    "blocks8b": blocks(shape(8, 4_096, 32, 8, 14_336), 2_048),
    # GPT-2's shape (Radford et al. 2019) with half its vocabulary: 124 M, launching costs most
    "small125m": decoder(shape(12, 768, 12, 12, 2_048), 25_600, 128, rows=1),
    "tiny": decoder(shape(2, 32, 2, 1, 96), 64, 8, rows=1),
    "tinyblocks": blocks(shape(3, 32, 2, 1, 96), 8),
}
