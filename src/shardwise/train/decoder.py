"""A decoder with Llama's shape and Llama's names, small enough to read.

RMSNorm, rotary positions, SwiGLU and grouped-query attention, as in Llama 2 and 3 (Touvron et
al. 2023, arXiv 2307.09288). The names are those of `transformers`, so a trained model is a
`LlamaForCausalLM` folder as it is: no conversion script, no table of renamed weights.

    Decoder
    ├── model       Trunk
    │   ├── embed_tokens     ids → vectors
    │   ├── layers           Block × layers: x + attention(norm(x)), x + mlp(norm(x))
    │   └── norm
    └── lm_head     vectors → logits; with `tied` it *is* embed_tokens.weight

Attention is causal over a whole row. Documents are packed with an end token between them, and
attention crosses that border, as in GPT-2's pre-training: rows keep one shape, and the fast
causal kernel applies. Samples of fine-tuning come with positions and segments, and attend to
themselves only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.recipe.model_config import ModelConfig

Angles = tuple[Tensor, Tensor]  # cosines and sines, [length, size] each

INIT_STD = 0.02  # standard deviation of every matrix at the start, as in GPT-2


class Projection(nn.Linear):
    """A linear map without bias, and the standard deviation of its first weights.

    The standard deviation is kept in the module, so that a model built on the meta device can be
    initialised one unit at a time.
    """

    def __init__(self, inputs: int, outputs: int, std: float = INIT_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        _draw(self.weight, self.std, generator)


class Embedding(nn.Embedding):
    """Token vectors, initialised like the matrices so that they can be tied to the head."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        _draw(self.weight, INIT_STD, generator)


def _draw(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    if not weight.is_meta:  # to draw nothing there, torch would import its compiler: a second
        nn.init.normal_(weight, std=std, generator=generator)


class RMSNorm(nn.Module):
    """Divide by the root mean square, then scale. Computed in fp32, as Llama does.

    Written in elementary operations to equal `transformers` bit by bit.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` → the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): a table of angles, not a parameter.

    The table is a buffer that is never saved; ``reset_parameters`` recomputes it.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, context: int, size: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.register_buffer("cosine", torch.empty(context, size), persistent=False)
        self.register_buffer("sine", torch.empty(context, size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        context, size = self.cosine.shape
        device = self.cosine.device
        if self.cosine.is_meta:  # as for ``_draw``
            return
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        positions = torch.arange(context, dtype=torch.float32, device=device)
        angles = torch.outer(positions, 1.0 / self.theta**exponent).repeat(1, 2)
        self.cosine.copy_(angles.cos())
        self.sine.copy_(angles.sin())

    def forward(self, length: int, positions: Tensor | None = None) -> Angles:
        """Cosines and sines, fp32: ``[length, size]`` each for the first ``length`` positions.

        For ``positions`` of ``[batch, length]`` they are ``[batch, 1, length, size]``.
        """
        if positions is None:
            return self.cosine[:length], self.sine[:length]
        return self.cosine[positions][:, None], self.sine[positions][:, None]


def own_sample(segments: Tensor) -> Tensor:
    """Return which earlier tokens each token attends to: those of its own segment.

    ``[batch, length] → [batch, 1, length, length]`` bool.
    """
    return (segments[:, :, None] == segments[:, None, :]).tril()[:, None]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate each pair (i, i + size/2) of ``[batch, heads, length, size]`` by its position."""
    cosine, sine = (table.to(x.dtype) for table in angles)
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size = config.head_size
        self.groups = config.heads // config.kv_heads
        residual_std = (
            INIT_STD / (2 * config.layers) ** 0.5
        )  # each layer adds to the residual twice
        self.q_proj = Projection(config.width, config.heads * self.size)
        self.k_proj = Projection(config.width, config.kv_heads * self.size)
        self.v_proj = Projection(config.width, config.kv_heads * self.size)
        self.o_proj = Projection(config.heads * self.size, config.width, std=residual_std)

    def forward(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` → the same; without a mask each token sees all before it."""
        query = rotate(self._heads(self.q_proj(x)), angles)
        key = rotate(self._heads(self.k_proj(x)), angles).repeat_interleave(self.groups, dim=1)
        value = self._heads(self.v_proj(x)).repeat_interleave(self.groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """``[batch, length, heads * size]`` → ``[batch, heads, length, size]``."""
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.size).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): one projection gates the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        self.gate_proj = Projection(config.width, config.hidden)
        self.up_proj = Projection(config.width, config.hidden)
        self.down_proj = Projection(config.hidden, config.width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` → the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and SwiGLU, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Angles, mask: Tensor | None = None) -> Tensor:
        """``[batch, length, width]`` → the same."""
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderModel(nn.Module):
    """Everything except the head: ids to vectors."""

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary_emb = Rotary(context, config.head_size, config.rope_theta)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """``[batch, length]`` → ``[batch, length, width]``."""
        x: Tensor = self.embed_tokens(ids)
        angles = self.rotary_emb(ids.shape[1], positions)
        mask = None if segments is None else own_sample(segments)
        for layer in self.layers:
            x = layer(x, angles, mask)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """The language model: the ids of a row to logits of the next id at each position.

    Args:
        config: the shape.
        vocabulary: the number of token ids.
        context: the longest row.
    """

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.model = DecoderModel(config, vocabulary, context)
        self.lm_head = Projection(config.width, vocabulary)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, as models of ``transformers`` do."""
        return self.lm_head

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """``[batch, length]`` int64 → logits ``[batch, length, vocabulary]``.

        Args:
            ids: of the tokens.
            positions: ``[batch, length]``, as in ``MicroBatch``; ``None`` = 0, 1, 2, ….
            segments: likewise; ``None`` = a row is one sample.
        """
        logits: Tensor = self.lm_head(self.model(ids, positions, segments))
        return logits


def initialiser(generator: torch.Generator) -> Callable[[nn.Module], None]:
    """A function that initialises a module of the decoder, with ``generator`` only."""

    def init(module: nn.Module) -> None:
        if isinstance(module, Projection | Embedding):
            module.reset_parameters(generator)
        elif isinstance(module, RMSNorm | Rotary):
            module.reset_parameters()

    return init
