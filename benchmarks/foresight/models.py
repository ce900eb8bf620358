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
Logits = Literal["whole", "held", "fused", "tokens", "vocabulary"]
"""What of the logits is alive at once: all of them, in float32; also what the model returned, until
the step ends, as in a loop around transformers' models; all in bf16, where the loss is one kernel;
or a part at a time, made twice: some tokens of all, or all tokens for a part of the vocabulary."""
TOKENS, VOCABULARY = (
    8,
    2048,
)  # parts of all tokens (torchtune); entries of the vocabulary (prime-rl)


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


@dataclass(frozen=True)
class Adapters:
    """Of low rank, on frozen weights.

    Attributes:
        rank: 0 for none.
        on: the linear maps that have one: those of attention's inputs, all, or all but attention's
            last.
        drops: a part of their inputs is dropped.
    """

    rank: int = 8
    on: Literal["attention", "all", "inputs"] = "attention"
    drops: bool = False


class Adapted(nn.Linear):
    """A frozen linear map and the product of two low-rank ones."""

    def __init__(self, inputs: int, outputs: int, adapters: Adapters) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.down = nn.Linear(inputs, adapters.rank, bias=False)
        self.up = nn.Linear(adapters.rank, outputs, bias=False)
        self.drops = adapters.drops

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` → ``[..., outputs]``."""
        kept = x * torch.ones(x.shape, dtype=torch.bool, device=x.device) if self.drops else x
        added: Tensor = self.up(self.down(kept))
        return F.linear(x, self.weight) + 2.0 * added


class _Fused(torch.autograd.Function):
    """One kernel for what is elementwise: it keeps its inputs, and has no memory besides."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _fused(*inputs: Tensor) -> Tensor:
    return cast("Tensor", _Fused.apply(*inputs))  # type: ignore[no-untyped-call]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, shape: Shape, adapters: Adapters, compiled: bool) -> None:
        super().__init__()
        self.shape, self.compiled = shape, compiled

        def linear(inputs: int, outputs: int, adapted: bool = adapters.on != "attention") -> Any:
            if adapters.rank and adapted:
                return Adapted(inputs, outputs, adapters)
            return nn.Linear(inputs, outputs, bias=False)

        attended = shape.heads * shape.head_size
        kv = shape.kv_heads * shape.head_size
        self.norms = nn.ModuleList(_norm(shape) for _ in range(2))
        self.q, self.k, self.v = (
            linear(shape.width, size, adapted=True) for size in (attended, kv, kv)
        )
        self.out = linear(attended, shape.width, adapted=adapters.on == "all")
        self.up = linear(shape.width, shape.hidden)
        self.gate = linear(shape.width, shape.hidden) if shape.gated else None
        self.down = linear(shape.hidden, shape.width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """``[batch, length, width]`` → the same."""
        y = self._normed(0, x)
        q, k, v = (self._heads(each(y)) for each in (self.q, self.k, self.v))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        groups = self.shape.heads // self.shape.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(self._wide(self._normed(1, x)))
        return x + added

    def _normed(self, number: int, x: Tensor) -> Tensor:
        norm = self.norms[number]
        weight: Any = norm.weight
        return _fused(x, weight) if self.compiled else cast("Tensor", norm(x))

    def _wide(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if self.gate is None:
            return _fused(up) if self.compiled else F.gelu(up)
        gate: Tensor = self.gate(x)
        return _fused(gate, up) if self.compiled else F.silu(gate) * up

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
        checkpointing, logits: see ``Checkpointing`` and ``Logits``.
        compiled: what is elementwise is one kernel, which keeps its inputs alone. Kernels count
            whatever this is, so it says something about memory only.
    """

    length: int
    adapters: Adapters = Adapters(0)
    checkpointing: Checkpointing = "none"
    logits: Logits = "whole"
    compiled: bool = False


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
            Block(shape, variant.adapters, variant.compiled) for _ in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        if variant.adapters.rank:
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
        return self._loss(x.flatten(0, 1))

    def _loss(self, x: Tensor) -> Tensor:
        """``[tokens, width]`` → the mean cross-entropy."""
        match self.variant.logits:
            case "tokens" | "vocabulary" as along:
                inputs = x, self.head.weight, along
                return cast("Tensor", _LossInParts.apply(*inputs))  # type: ignore[no-untyped-call]
            case "fused":
                return _fused(self.head(x)).flatten()[0].float()
            case "held":
                logits = self.head(x).float()
                loss = _loss(logits)
                loss.register_hook(partial(_hold, logits))
                return loss
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


def _hold(_: Tensor, gradient: Tensor) -> Tensor:
    """A hook of a tensor, which so holds another one as long as it has its own graph."""
    return gradient


class _LossInParts(torch.autograd.Function):
    """The same, of ``x`` and the head's weight: logits of one part at a time are made, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, along: Logits) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.along = along
        return torch.stack([_loss(a @ b.T) for a, b in _parts(x, weight, along)]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[1] or ctx.along == "vocabulary"  # prime-rl makes it anyway
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight) if needed else None
        sums = _parts(of_x, weight if of_weight is None else of_weight, ctx.along)
        for (a, b), (of_a, of_b) in zip(_parts(x, weight, ctx.along), sums, strict=True):
            of_logits = torch.softmax((a @ b.T).float(), -1).mul_(gradients[0])
            narrow = of_logits.to(x.dtype)
            of_a.add_(narrow @ b)
            if of_weight is not None:
                of_b.add_(narrow.T @ a)
        return of_x, of_weight if ctx.needs_input_grad[1] else None, None


def _parts(x: Tensor, weight: Tensor, along: Logits) -> list[tuple[Tensor, Tensor]]:
    """Tokens and entries of the vocabulary whose logits are alive at once."""
    if along == "tokens":
        return [(part, weight) for part in x.chunk(TOKENS)]
    return [(x, part) for part in weight.split(VOCABULARY)]


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
