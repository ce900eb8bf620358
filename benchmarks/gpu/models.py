"""What is trained: blocks of an 8B model, a model so small that launching it costs most, a toy.

The blocks have the shape of Llama 3 8B (Grattafiori et al. 2024, arXiv 2407.21783): width 4,096,
32 query and 8 key heads, SwiGLU of 14,336: 218 M parameters each. The small one has the blocks of
GPT-2 (Radford et al. 2019) with Llama's parts, and half its vocabulary, so that it has 124 M
parameters with an embedding and a head of their own: tied ones are gathered by rules that differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.training import Batch, Loss, next_token_loss, token_batch
from shardwise.train.config import ModelConfig
from shardwise.train.decoder import Block, Decoder, Rotary


@dataclass(frozen=True)
class Shape:
    """A model and the rows that it sees."""

    layers: int  # blocks
    width: int  # of a token's vector
    heads: int  # of queries
    kv_heads: int  # of keys and values
    hidden: int  # width of the SwiGLU
    vocabulary: int  # 0 for the blocks alone, without embedding and head
    tokens: int  # of a row; batch 1

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            tied=False,
        )


SHAPES: dict[str, Shape] = {
    "blocks8b": Shape(8, 4_096, 32, 8, 14_336, 0, tokens=2_048),
    "small125m": Shape(12, 768, 12, 12, 2_048, 25_600, tokens=128),
    "tiny": Shape(2, 32, 2, 1, 96, 64, tokens=8),
    "tinyblocks": Shape(3, 32, 2, 1, 96, 0, tokens=8),
}


class Stack(nn.Module):
    """What lies between an embedding and a head: blocks, and their table of positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = shape.config
        self.layers = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.rotary_emb = Rotary(shape.tokens, config.head_size, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, tokens, width]`` → the same."""
        angles = self.rotary_emb(x.shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        return x


def build(shape: Shape) -> nn.Module:
    """A new model on torch's default device; parameters in fp32.

    Its table of positions is in bf16, or each block would cast it once more, in an engine's account
    or in the model's, as the engine has it.
    """
    vocabulary = shape.vocabulary
    model = Decoder(shape.config, vocabulary, shape.tokens) if vocabulary else Stack(shape)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.bfloat16()
    return model


def batch_of(shape: Shape, device: torch.device, seed: int) -> Batch:
    """Ids and targets; or hidden states alone, with a gradient, where there is no embedding."""
    generator = torch.Generator().manual_seed(seed)
    if shape.vocabulary:
        batch = token_batch(generator, shape.vocabulary, 1, shape.tokens)
        return tuple(rows.to(device) for rows in batch)
    hidden = torch.randn(1, shape.tokens, shape.width, generator=generator)
    return (hidden.to(device, torch.bfloat16).requires_grad_(),)


def loss_of(shape: Shape) -> Loss:
    """The loss that belongs to the batches of this shape."""
    return next_token_loss if shape.vocabulary else _mean_square


def _mean_square(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch[0].detach().requires_grad_())
    return out.float().square().mean()


def summary(shape: Shape) -> str:
    """One line for the table."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in build(shape).parameters())
    ends = f", vocabulary {shape.vocabulary:,}" if shape.vocabulary else ", no embedding or head"
    return (
        f"{shape.layers} blocks of width {shape.width:,}{ends}: {numel / 1e6:,.1f} M parameters, "
        f"1 × {shape.tokens:,} tokens"
    )
