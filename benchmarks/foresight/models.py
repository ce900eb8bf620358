"""Decoders of published results on the meta device.

One or two blocks are observed, and stand for all of them: blocks of one model are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
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

from benchmarks.foresight.shapes import Shape
from shardwise.torch_internals import flash_attention
from shardwise.train.decoder import RMSNorm, rotate

Checkpointing = Literal["none", "full", "second", "matmuls", "moved"]
"""Blocks that are recomputed: none, all, every second; or what of each: all but attention and every
second product, all but attention and products."""
Logits = Literal["whole", "held", "narrow", "kept", "fused", "cast", "tokens", "vocabulary", "once"]
"""What of the logits is alive at once: all of them, in float32; also what the model returned, until
the step ends, as in a loop around transformers' models; all in bf16, as the loss is, also with what
the model returned; or in bf16 where the loss is one kernel; what a model returned in bf16, and in
float32 for such a kernel, which makes gradients in place; or a part at a time, made twice: some
tokens of all, or all tokens for a part of the vocabulary; or once: some tokens of all, in bf16,
whose gradients the forward pass makes (Liger)."""
TOKENS = 8  # parts of all tokens (torchtune)
VOCABULARY = 2048  # entries of a part of it (prime-rl)


@dataclass(frozen=True)
class Adapters:
    """Adapters of low rank, on frozen weights.

    Attributes:
        rank: 0 for none.
        on: the linear maps that have one: those of attention's inputs, all, or all but attention's
            last.
        drops: a part of their inputs is dropped.
        wide: they and their inputs are in float32, whatever the other weights are in.
    """

    rank: int = 8
    on: Literal["attention", "all", "inputs"] = "attention"
    drops: bool = False
    wide: bool = False


class Linear(nn.Linear):
    """A linear map in bfloat16, as autocast makes one of float32: both its inputs are cast."""

    keeps = False  # its input, also where it is frozen, as bitsandbytes did
    returns = False  # what came, in its dtype, as bitsandbytes does with weights of 4 bits

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` → ``[..., outputs]``."""
        narrow = x.bfloat16()
        y = F.linear(narrow, self.weight.bfloat16())
        if self.keeps and y.requires_grad:
            y.register_hook(partial(_hold, narrow))
        return y.to(x.dtype) if self.returns else y


class Adapted(Linear):
    """A frozen linear map and the product of two low-rank ones."""

    def __init__(self, inputs: int, outputs: int, adapters: Adapters) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.down = Linear(inputs, adapters.rank, bias=False)
        self.up = Linear(adapters.rank, outputs, bias=False)
        self.drops, self.wide = adapters.drops, adapters.wide

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` → ``[..., outputs]``."""
        kept = x.float() if self.wide else x
        if self.drops:
            kept = kept * torch.ones(x.shape, dtype=torch.bool, device=x.device)
        added: Tensor = self.up(self.down(kept))
        return super().forward(x) + 2.0 * added


class _Fused(torch.autograd.Function):
    """One kernel for what is elementwise: it keeps its inputs, and moves each tensor once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        first, *others = inputs
        return first * others[0] if others else first.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (of_output,) = gradients
        return tuple(
            of_output * kept if kept.shape == of_output.shape else torch.empty_like(kept)
            for kept in ctx.saved_tensors
        )


class _Turned(torch.autograd.Function):
    """One kernel each way that keeps nothing."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def _fused(*inputs: Tensor) -> Tensor:
    return cast("Tensor", _Fused.apply(*inputs))  # type: ignore[no-untyped-call]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self.shape, self.compiled, self.fused = shape, variant.compiled, variant.fused
        self.formula, self.autocast = variant.formula, variant.autocast
        adapters = variant.adapters

        def linear(inputs: int, outputs: int, adapted: bool = adapters.on != "attention") -> Any:
            if adapters.rank and adapted:
                layer: Linear = Adapted(inputs, outputs, adapters)
            else:
                layer = Linear(inputs, outputs, bias=False)
            layer.returns, layer.keeps = variant.returns, variant.keeps
            return layer

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
            q, k = self._rotated(q, angles), self._rotated(k, angles)
        groups = self.shape.heads // self.shape.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = x + self.out(self._attended(q, k, v).transpose(1, 2).flatten(2))
        added: Tensor = self.down(self._wide(self._normed(1, x)))
        return x + added

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[batch, heads, length, size]`` each and returned."""
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1)
        if self.compiled:
            return _fused(scores) @ v
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = (scores * self.shape.head_size**-0.5).masked_fill(later, -1e4)
        weights: Tensor = scores.softmax(-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v

    def _rotated(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return cast("Tensor", _Turned.apply(x)) if self.compiled else rotate(x, angles)  # type: ignore[no-untyped-call]

    def _normed(self, number: int, x: Tensor) -> Tensor:
        norm = self.norms[number]
        weight: Any = norm.weight
        return _fused(x, weight) if self.compiled else cast("Tensor", norm(x))

    def _wide(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if self.gate is None:
            gelu = partial(_gelu, wide=self.autocast) if self.formula else F.gelu
            return _fused(up) if self.compiled else gelu(up)
        gate: Tensor = self.gate(x)
        return _fused(gate, up) if self.compiled else F.silu(gate) * up

    def _heads(self, x: Tensor) -> Tensor:
        """``[batch, length, heads * size] → [batch, heads, length, size]``."""
        heads: Tensor = x.unflatten(-1, (-1, self.shape.head_size))
        return heads.transpose(1, 2)


def _gelu(x: Tensor, wide: bool) -> Tensor:
    """Kernel by kernel; ``wide``: autocast makes float32 of what is raised to a power."""
    cubed = torch.pow(x.float() if wide else x, 3.0)
    return 0.5 * x * (1.0 + torch.tanh(0.7979 * (x + 0.044715 * cubed)))


def _norm(shape: Shape) -> nn.Module:
    return RMSNorm(shape.width, 1e-5) if shape.gated else nn.LayerNorm(shape.width, bias=False)


@dataclass(frozen=True)
class Variant:
    """The parameters of a shape that are trained, and how.

    Attributes:
        length: of a sequence.
        checkpointing, logits: see ``Checkpointing`` and ``Logits``.
        fused: attention is one kernel; else its scores are in memory.
        autocast: parameters and what passes from block to block are in float32.
        compiled: what is elementwise is one kernel, which moves and keeps its inputs alone.
        returns: linear maps of blocks return the dtype that came.
        keeps: they keep their inputs, also where they are frozen.
        formula: GELU is no one kernel.
    """

    length: int
    adapters: Adapters = Adapters(0)
    checkpointing: Checkpointing = "none"
    logits: Logits = "whole"
    fused: bool = True
    autocast: bool = False
    compiled: bool = False
    returns: bool = False
    keeps: bool = False
    formula: bool = False


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
        self.blocks = nn.ModuleList(Block(shape, variant) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
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
            case "once":
                return cast("Tensor", _LossOnce.apply(x, self.head.weight))  # type: ignore[no-untyped-call]
            case "tokens" | "vocabulary" as along:
                inputs = x, self.head.weight, along
                return cast("Tensor", _LossInParts.apply(*inputs))  # type: ignore[no-untyped-call]
            case "narrow" | "kept" as kind:
                logits = self.head(x)
                loss = F.cross_entropy(logits, _targets(logits))
                if kind == "kept":
                    loss.register_hook(partial(_hold, logits))
                return loss
            case "fused" | "cast" as kind:
                logits, wide = self.head(x), kind == "cast"
                read = logits.float() if wide else logits
                loss = cast("Tensor", _FusedLoss.apply(read, wide))  # type: ignore[no-untyped-call]
                if wide:
                    loss.register_hook(partial(_hold, logits))
                return loss
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


class _FusedLoss(torch.autograd.Function):
    """One kernel forward, and one backward, perhaps in place: of ``[tokens, vocabulary]``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.in_place = in_place
        return torch.empty((), device=logits.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits.detach() if ctx.in_place else torch.empty_like(logits), None


def _loss(logits: Tensor) -> Tensor:
    """``[tokens, vocabulary]`` → the mean cross-entropy, in float32."""
    return F.cross_entropy(logits.float(), _targets(logits))


def _targets(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.long, device=logits.device)


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


class _LossOnce(torch.autograd.Function):
    """The same, of as many tokens at a time as make logits of the size of ``x``, as Liger does it.

    One kernel makes gradients of logits in place of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x = torch.empty_like(x)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        tokens = len(x) // math.ceil(len(weight) / x.shape[1])
        tokens = 2 ** math.ceil(math.log2(max(tokens, 1)))
        for a, of_a in zip(x.split(tokens), of_x.split(tokens), strict=True):
            of_logits = (a @ weight.T).mul_(1.0)
            of_a.copy_(of_logits @ weight)
            if of_weight is not None:
                of_weight.add_(of_logits.T @ a)
        ctx.save_for_backward(of_x, of_weight)
        return torch.empty((), device=x.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x, of_weight


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
