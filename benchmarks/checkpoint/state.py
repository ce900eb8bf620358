"""What is saved: the same bits for every method, whoever holds which part of them.

Every number follows from the name of its tensor and its place in it, so a rank makes just what it
holds, and two engines that cut a tensor differently still hold the same one. Whether they do is
asked with a digest that adds up over ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training import Batch, decoder_config, token_batch
from shardwise.train.config import ModelConfig
from shardwise.train.decoder import Decoder

TOKENS = 32
BYTES = 12  # of a parameter with Adam's two moments, all float32
KINDS = {"param": 0.02, "exp_avg": 1e-3, "exp_avg_sq": 1e-5}  # and the largest value of each


@dataclass(frozen=True)
class Part:
    """A rank's part of one tensor."""

    kind: str  # of ``KINDS``
    name: str  # of the parameter
    start: int  # the first element of the flattened tensor
    value: Tensor  # any shape; where it lies


@dataclass(frozen=True)
class Size:
    """A decoder with about this much state."""

    gigabytes: float  # 10⁹ bytes of parameters and both moments

    @property
    def width(self) -> int:
        return 768 if self.gigabytes >= 0.4 else 64

    @property
    def vocabulary(self) -> int:
        return 8_192 if self.width > 64 else 512

    @property
    def config(self) -> ModelConfig:
        """As many blocks as fit; their number is what varies."""
        block = 4 * self.width**2 + 3 * self.width * (self.width * 43 // 16)
        rest = self.gigabytes * 1e9 / BYTES - 2 * self.vocabulary * self.width
        return decoder_config(self.width, max(1, round(rest / block)))

    def new_model(self) -> Decoder:
        """The same on every rank."""
        torch.manual_seed(0)
        return Decoder(self.config, self.vocabulary, TOKENS)

    def batch(self, rank: int) -> Batch:
        """Inputs and targets, ``[1, TOKENS]`` int64."""
        return token_batch(torch.Generator().manual_seed(rank), self.vocabulary, 1, TOKENS)


def drawn(kind: str, name: str, start: int, stop: int) -> Tensor:
    """Elements ``[start, stop)`` of a tensor, float32: 24 bits of each vary, and none is wild."""
    mixed = torch.arange(start, stop).mul_(2_654_435_761).add_(zlib.crc32(name.encode()))
    bits = mixed.bitwise_xor_(mixed >> 13).bitwise_and_(0xFFFFFF)
    return bits.to(torch.float32).mul_(KINDS[kind] / (1 << 24))


def digest(parts: list[Part]) -> str:
    """Of the whole state, the same however it is cut. A collective.

    A sum modulo 2^64 of every element's bits times an odd number that is its place's own: if one
    element changes, so does the sum, and if two change places, almost surely too.
    """
    sums = dict.fromkeys(KINDS, 0)
    for part in parts:
        bits = part.value.reshape(-1).view(torch.int32).to(torch.int64)
        place = torch.arange(part.start, part.start + len(bits))
        place.add_(zlib.crc32(part.name.encode()) << 16).mul_(2).add_(1)
        sums[part.kind] += int(bits.mul_(place).sum())
    wrapped = [(value + 2**63) % 2**64 - 2**63 for value in sums.values()]
    total = torch.tensor(wrapped, dtype=torch.int64)
    dist.all_reduce(total)
    return "".join(f"{value % 2**64:016x}" for value in total.tolist())


def unlike(parts: list[Part], expected: Mapping[tuple[str, str], Tensor]) -> list[str]:
    """The parts that are not, bit for bit, what is expected; and what is not there at all."""
    values = {(part.kind, part.name): part.value.reshape(-1) for part in parts}
    return [
        f"{kind} of {name}"
        for (kind, name), value in expected.items()
        if (kind, name) not in values
        or not torch.equal(values[kind, name].view(torch.int32), value.view(torch.int32))
    ]
