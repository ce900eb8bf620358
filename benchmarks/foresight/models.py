"""Decoders of published results, by name, on the meta device.

One or two blocks are observed, and stand for all of them: blocks of one model are alike.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.torch_internals import flash_attention
from shardwise.train.decoder import RMSNorm, rotate

Checkpointing = Literal["none", "full", "second", "matmuls", "moved"]
"""Blocks that are recomputed: none, all, every second; or what of each: all but attention and every
second product, all but attention and products."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the feed-forward network
    vocabulary: int
    head_size: int
    gated: bool = True  # SwiGLU and RMSNorm with rotary positions; else GELU and LayerNorm
    tied: bool = False

    @property
    def block_parameters(self) -> int:
        """Of the products of one block."""
        attended = self.head_size * (self.heads + self.kv_heads)
        return self.width * (2 * attended + (2 + self.gated) * self.hidden)

    @property
    def parameters(self) -> int:
        """Without norms and positions."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * self.block_parameters + tables


def _llama(*sizes: int, head_size: int = 0, tied: bool = False) -> Shape:
    layers, width, heads, kv_heads, hidden, vocabulary = sizes
    size = head_size or width // heads
    return Shape(layers, width, heads, kv_heads, hidden, vocabulary, size, tied=tied)


def _gpt(layers: int, width: int, heads: int, vocabulary: int = 50_368) -> Shape:
    size = width // heads
    return Shape(layers, width, heads, heads, 4 * width, vocabulary, size, gated=False, tied=True)


# Layers, width, heads, heads of keys and values, feed-forward, vocabulary: as in the config.json of
# each, or in the publication.
SHAPES = {
    r"mpt-125m": _gpt(12, 768, 12),
    r"mpt-350m": _gpt(24, 1024, 16),
    r"mpt-760m": _gpt(24, 1536, 12),
    r"mpt-1b": _gpt(24, 2048, 16),
    r"mpt-3b": _gpt(32, 2560, 20),
    r"mpt-7b": _gpt(32, 4096, 32),
    r"mpt-13b": _gpt(40, 5120, 40),
    r"mpt-30b": _gpt(48, 7168, 56),
    r"mpt-70b": _gpt(80, 8192, 64),
    r"gpt3?-5b": _gpt(24, 4096, 32, 51_200),
    r"gpt3?-175b": _gpt(96, 12288, 96, 50_257),
    r"gpt-1t": _gpt(128, 25600, 160, 50_257),
    r"llama-?3(\.\d)?-405b": _llama(126, 16384, 128, 8, 53248, 128_256),
    r"llama-?3(\.\d)?-70b": _llama(80, 8192, 64, 8, 28672, 128_256),
    r"llama-?3(\.\d)?-8b": _llama(32, 4096, 32, 8, 14336, 128_256),
    r"llama-?3\.2-3b": _llama(28, 3072, 24, 8, 8192, 128_256, tied=True),
    r"llama-?3\.2-1b": _llama(16, 2048, 32, 8, 8192, 128_256, tied=True),
    r"(code)?llama-?(2-)?34b": _llama(48, 8192, 64, 8, 22016, 32_000),
    r"llama-?(1-)?(30|33)b": _llama(60, 6656, 52, 52, 17920, 32_000),
    r"llama-?(1-)?65b": _llama(80, 8192, 64, 64, 22016, 32_000),
    r"llama-?2-?70b": _llama(80, 8192, 64, 8, 28672, 32_000),
    r"llama-?(2-?)?13b": _llama(40, 5120, 40, 40, 13824, 32_000),
    r"llama-?(2-?)?7b": _llama(32, 4096, 32, 32, 11008, 32_000),
    r"tinyllama": _llama(22, 2048, 32, 4, 5632, 32_000),
    r"mistral-7b": _llama(32, 4096, 32, 8, 14336, 32_000),
    r"yi-34b": _llama(60, 7168, 56, 8, 20480, 64_000),
    r"smollm.*1\.7b": _llama(24, 2048, 32, 32, 8192, 49_152, tied=True),
    r"qwen2(\.5)?-0\.5b": _llama(24, 896, 14, 2, 4864, 151_936, tied=True),
    r"qwen2(\.5)?-1\.5b": _llama(28, 1536, 12, 2, 8960, 151_936, tied=True),
    r"qwen2(\.5)?-3b": _llama(36, 2048, 16, 2, 11008, 151_936, tied=True),
    r"qwen2(\.5)?-7b": _llama(28, 3584, 28, 4, 18944, 152_064),
    r"qwen2(\.5)?-14b": _llama(48, 5120, 40, 8, 13824, 152_064),
    r"qwen2(\.5)?-32b": _llama(64, 5120, 40, 8, 27648, 152_064),
    r"qwen2(\.5)?-72b": _llama(80, 8192, 64, 8, 29568, 152_064),
    r"qwen3-0\.6b": _llama(28, 1024, 16, 8, 3072, 151_936, head_size=128, tied=True),
    r"qwen3-1\.7b": _llama(28, 2048, 16, 8, 6144, 151_936, head_size=128, tied=True),
    r"qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151_936, head_size=128, tied=True),
    r"qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151_936, head_size=128),
    r"qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151_936, head_size=128),
    r"qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151_936, head_size=128),
    # github.com/AI-Hypercomputer/maxtext: global_parameter_scale of 16 to 128
    r"maxtext-16b": _llama(32, 4096, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-32b": _llama(32, 8192, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-64b": _llama(64, 8192, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-128b": _llama(64, 8192, 128, 128, 57344, 32_000, head_size=128),
}


def shape_named(name: str) -> Shape | None:
    """The shape of a known model; ``None`` for others, and for mixtures of experts."""
    plain = name.lower().replace(" ", "-").replace("_", "-")
    if "moe" in plain or re.search(r"-a\d+b", plain):
        return None
    of_name = (s for pattern, s in SHAPES.items() if re.search(pattern + r"(?![\d.])", plain))
    return next(of_name, None)


class Adapted(nn.Linear):
    """A frozen linear map and the product of two low-rank ones."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return F.linear(x, self.weight) + 2.0 * added


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, shape: Shape, rank: int, everywhere: bool) -> None:
        super().__init__()
        self.shape = shape

        def linear(inputs: int, outputs: int, adapted: bool = everywhere) -> nn.Linear:
            if rank and adapted:
                return Adapted(inputs, outputs, rank)
            return nn.Linear(inputs, outputs, bias=False)

        attended = shape.heads * shape.head_size
        kv = shape.kv_heads * shape.head_size
        self.norms = nn.ModuleList(_norm(shape) for _ in range(2))
        self.q, self.k, self.v = (
            linear(shape.width, size, adapted=True) for size in (attended, kv, kv)
        )
        self.out = linear(attended, shape.width)
        self.up = linear(shape.width, shape.hidden)
        self.gate = linear(shape.width, shape.hidden) if shape.gated else None
        self.down = linear(shape.hidden, shape.width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """``[batch, length, width]`` → the same."""
        y = self.norms[0](x)
        q, k, v = (self._heads(each(y)) for each in (self.q, self.k, self.v))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        groups = self.shape.heads // self.shape.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        wide = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        added: Tensor = self.down(wide)
        return x + added

    def _heads(self, x: Tensor) -> Tensor:
        """``[batch, length, heads * size] → [batch, heads, length, size]``."""
        heads: Tensor = x.unflatten(-1, (-1, self.shape.head_size))
        return heads.transpose(1, 2)


def _norm(shape: Shape) -> nn.Module:
    return RMSNorm(shape.width, 1e-5) if shape.gated else nn.LayerNorm(shape.width, bias=False)


@dataclass(frozen=True)
class Variant:
    """What is trained of a shape, and how.

    Attributes:
        length: of a sequence.
        rank: of adapters on frozen weights; 0 for none.
        everywhere: adapters are on all linear maps, and not on those of attention alone.
        checkpointing: the policy; see ``Checkpointing``.
        chunks: parts of a sequence whose logits are computed, and recomputed, one after the other.
    """

    length: int
    rank: int = 0
    everywhere: bool = False
    checkpointing: Checkpointing = "none"
    chunks: int = 1


class Decoder(nn.Module):
    """A decoder of this shape, which returns its loss."""

    angles: Tensor

    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(variant.length, shape.width)
        angles = torch.empty(2, variant.length, shape.head_size)
        self.register_buffer("angles", angles, persistent=False)
        self.blocks = nn.ModuleList(
            Block(shape, variant.rank, variant.everywhere) for _ in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        if variant.rank:
            self.requires_grad_(False)
            for part in self.modules():
                if isinstance(part, Adapted):
                    part.down.requires_grad_()
                    part.up.requires_grad_()

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, length]`` → the mean cross-entropy."""
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(self.variant.length, device=ids.device))
        angles = None if self.positions is not None else (self.angles[0], self.angles[1])
        for number, block in enumerate(self.blocks):
            x = self._run(number, block, x, angles)
        x = self.norm(x)
        x = x.flatten(0, 1)
        if self.variant.chunks > 1:
            inputs = x, self.head.weight, self.variant.chunks
            return cast("Tensor", _ChunkedLoss.apply(*inputs))  # type: ignore[no-untyped-call]
        return _loss(self.head(x))

    def _run(self, number: int, block: nn.Module, *inputs: Any) -> Tensor:
        policy = self.variant.checkpointing
        if policy == "none" or (policy == "second" and number % 2 == 0):
            output = block(*inputs)
        elif policy in ("full", "second"):
            output = checkpoint(block, *inputs, use_reentrant=False)
        else:
            context = partial(_kept, every=1 if policy == "moved" else 2)
            output = checkpoint(block, *inputs, use_reentrant=False, context_fn=context)
        return cast("Tensor", output)


def _loss(logits: Tensor) -> Tensor:
    """``[tokens, vocabulary]`` → the mean cross-entropy, in float32."""
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.float(), targets)


class _ChunkedLoss(torch.autograd.Function):
    """The same, of ``x`` and the head's weight: logits of one part at a time are made, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        return torch.stack([_loss(part @ weight.T) for part in x.chunk(chunks)]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_x = []
        for part in x.chunk(ctx.chunks):
            of_logits = torch.softmax((part @ weight.T).float(), -1).mul_(gradients[0])
            narrow = of_logits.to(x.dtype)
            of_x.append(narrow @ weight)
            if of_weight is not None:
                of_weight += narrow.T @ part
        return torch.cat(of_x), of_weight, None


def _kept(every: int) -> Any:
    """Contexts of a checkpoint that keeps attention, and one of so many products."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator.overloadpacket is flash_attention:
            return CheckpointPolicy.MUST_SAVE
        if operator.overloadpacket is not torch.ops.aten.mm:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        keeps = seen[context.is_recompute] % every == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def few(shape: Shape, layers: int) -> Shape:
    """The same with so many layers."""
    return replace(shape, layers=layers)
