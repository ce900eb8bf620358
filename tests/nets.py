"""Tiny models built to be awkward, shared by all tests.

Each has fewer than 20,000 parameters, no dropout, and is the same for the same
``torch.manual_seed``. ``name()`` builds it, ``name_batch(seed, rows)`` makes its inputs with
the target last, ``loss(model, batch)`` is a mean over rows, so the losses of equal parts of a
batch average to the loss of the batch (but not for ``odd_convnet``, whose batch norm sees only
the rows of its own part, while training). Every module with parameters of its own has
``reset_parameters``, so each can be built on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy for integer targets, mean squared error for others. 0-dim, float32."""
    *inputs, target = batch
    output = model(*inputs).float()
    if target.is_floating_point():
        return F.mse_loss(output, target.float())  # torch 2.11 takes one dtype
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens(seed: int, shape: tuple[int, ...], vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def next_tokens(seed: int, rows: int, length: int, vocabulary: int) -> Batch:
    """Tokens and the tokens that follow them: int64, [rows, length] each."""
    text = tokens(seed, (rows, length + 1), vocabulary)
    return text[:, :-1], text[:, 1:]


class Table(nn.Embedding):
    """An embedding that is small enough to serve as a head, too."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)


# --- a decoder whose head is its embedding ---------------------------------------------------


class Attention(nn.Module):
    """Several heads; keys and values come from ``source``, or causally from the input itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        keyed = x if source is None else source
        q, k, v = (
            self._split(part) for part in (self.query(x), self.key(keyed), self.value(keyed))
        )
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        if source is None:
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return out


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width + 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; ``tied`` makes the head's weight the embedding's."""

    def __init__(
        self, width: int = 16, depth: int = 3, vocabulary: int = 37, *, tied: bool
    ) -> None:
        super().__init__()
        self.embed = Table(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out


def decoder() -> nn.Module:
    return Decoder(tied=False)


def decoder_batch(seed: int, rows: int) -> Batch:
    return next_tokens(seed, rows, 9, 37)


def tied_decoder() -> nn.Module:
    return Decoder(tied=True)


def tied_decoder_batch(seed: int, rows: int) -> Batch:
    return next_tokens(seed, rows, 9, 37)


# --- a convolutional net: odd sizes, batch norm and its buffers ------------------------------


class ConvBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class OddConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3)
        self.features = nn.Sequential(ConvBlock(5, 7), ConvBlock(7, 11), nn.MaxPool2d(2))
        self.classifier = nn.Linear(11 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(self.stem(x)).flatten(1))
        return out


def odd_convnet() -> nn.Module:
    return OddConvNet()


def odd_convnet_batch(seed: int, rows: int) -> Batch:
    return numbers(seed, (rows, 3, 9, 9)), tokens(seed + 1, (rows,), 3)


# --- mostly frozen: low-rank updates of a frozen decoder -------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices.

    The second is not zero, as it usually is, so that both have gradients from the first step.
    """

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def mostly_frozen() -> nn.Module:
    model = Decoder(tied=False).requires_grad_(requires_grad=False)
    for block in model.blocks:
        attention = block.get_submodule("attention")
        for name in ("query", "value"):
            setattr(attention, name, LowRank(attention.get_submodule(name)))  # type: ignore[arg-type]
    return model


def mostly_frozen_batch(seed: int, rows: int) -> Batch:
    return next_tokens(seed, rows, 9, 37)


# --- a scalar and 13 rows --------------------------------------------------------------------


class Scaled(nn.Module):
    """A 13-row matrix between a 0-dim scale and a 1-element offset, all its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.rows = nn.Parameter(torch.empty(13, width))
        self.back = nn.Linear(13, width)
        self.offset = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.7)
        nn.init.normal_(self.rows, std=0.3)
        nn.init.constant_(self.offset, -0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(F.linear(x, self.rows) * self.scale)
        out: Tensor = x + self.back(inner) + self.offset
        return out


class ScalarAnd13Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(()))  # the root's own, beside 13 rows
        self.project = nn.Linear(6, 13)
        self.blocks = nn.ModuleList(Scaled(13) for _ in range(2))
        self.head = nn.Linear(13, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.temperature, 1.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.temperature
        return out


def scalar_and_13_rows() -> nn.Module:
    return ScalarAnd13Rows()


def scalar_and_13_rows_batch(seed: int, rows: int) -> Batch:
    return numbers(seed, (rows, 6)), numbers(seed + 1, (rows, 2))


# --- a mixture of experts, one of which no token ever reaches --------------------------------


class Experts(nn.Module):
    """Tokens choose an expert by their number, so the choice never depends on rounding.

    Experts without tokens in a batch run on zero rows; the last is never run at all, and its
    parameters have no gradient.
    """

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count - 1)
        self.experts = nn.ModuleList(Mlp(width, width + 1) for _ in range(count))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(list(self.experts)[:-1]):
            mine = ids % (len(self.experts) - 1) == number
            out[mine] = expert(x[mine]) * weights[mine][:, number, None]
        return out


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.moe = Experts(width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.moe(self.norm(x), ids)
        return out


class ExpertDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Table(29, 12)
        self.layers = nn.ModuleList(ExpertBlock(12) for _ in range(2))
        self.lm_head = nn.Linear(12, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        out: Tensor = self.lm_head(x)
        return out


def unused_expert() -> nn.Module:
    return ExpertDecoder()


def unused_expert_batch(seed: int, rows: int) -> Batch:
    return next_tokens(seed, rows, 7, 29)


# --- an encoder and a decoder that share their embeddings ------------------------------------


class CrossBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.cross = Attention(width, 2)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        x = self.block(x)
        out: Tensor = x + self.cross(self.norm(x), source)
        return out


class Stack(nn.Module):
    def __init__(self, vocabulary: int, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed = Table(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, *source: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, *source)
        out: Tensor = self.norm(x)
        return out


class EncoderDecoder(nn.Module):
    """One weight is ``encoder.embed``'s, ``decoder.embed``'s and ``lm_head``'s."""

    def __init__(self, vocabulary: int = 31, width: int = 12) -> None:
        super().__init__()
        self.encoder = Stack(vocabulary, [Block(width) for _ in range(2)], width)
        self.decoder = Stack(vocabulary, [CrossBlock(width) for _ in range(2)], width)
        self.lm_head = nn.Linear(width, vocabulary)
        self.decoder.embed.weight = self.encoder.embed.weight
        self.lm_head.weight = self.encoder.embed.weight

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.decoder(ids, self.encoder(source)))
        return out


def encoder_decoder() -> nn.Module:
    return EncoderDecoder()


def encoder_decoder_batch(seed: int, rows: int) -> Batch:
    return (tokens(seed + 1, (rows, 6), 31), *next_tokens(seed, rows, 5, 31))


# --- everything else that models do ----------------------------------------------------------


class OddBlock(nn.Module):
    def __init__(self, width: int, shared: nn.Linear | None) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.again = self.fc  # one module under two names
        self.nothing = nn.Identity()
        self.none = nn.Parameter(torch.empty(0, width))
        self.gate = nn.Parameter(torch.empty(width))
        if shared is not None:
            self.fc.weight = shared.weight  # the biases stay apart
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate, 0.5)  # and ``none`` has no elements to set

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.again(self.nothing(self.fc(x))))


class Oddities(nn.Module):
    """Empty modules, an unused parameter and module, parameters of the root, a shared weight.

    ``blocks.0`` and ``blocks.2`` share ``fc.weight``; ``gain`` is the root's and ``tail``'s;
    ``unused`` (a parameter) and ``spare`` (a module) never compute; ``blocks.*.none`` has no
    elements.
    """

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.unused = nn.Parameter(torch.empty(3, 5))
        self.empty = nn.ModuleList()
        first, second = OddBlock(width, None), OddBlock(width, None)
        self.blocks = nn.Sequential(first, second, OddBlock(width, first.fc))
        self.spare = nn.Linear(4, 3)
        self.tail = nn.LayerNorm(width)
        self.reset_parameters()
        self.tail.weight = self.gain

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.9)
        nn.init.zeros_(self.unused)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.blocks(x) * self.gain)
        return out


def oddities() -> nn.Module:
    return Oddities()


def oddities_batch(seed: int, rows: int) -> Batch:
    return numbers(seed, (rows, 10)), numbers(seed + 1, (rows, 10))


# --- all of them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """A model for ``pytest.mark.parametrize("net", NETS, ids=str)``."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]

    def __str__(self) -> str:
        return self.build.__name__


NETS = (
    Net(decoder, decoder_batch),
    Net(tied_decoder, tied_decoder_batch),
    Net(odd_convnet, odd_convnet_batch),
    Net(mostly_frozen, mostly_frozen_batch),
    Net(scalar_and_13_rows, scalar_and_13_rows_batch),
    Net(unused_expert, unused_expert_batch),
    Net(encoder_decoder, encoder_decoder_batch),
    Net(oddities, oddities_batch),
)
