"""Blocks of 8-bit numbers with a scale each: what float32 would say in four times the bytes.

    piece [n]      | block 0, 256 elements | block 1 | … | last, shorter |
    encoded        | scales, float32, one for each block | values, one byte each |   uint8

A scale is the block's largest magnitude over the largest number of the dtype, so the error of an
element is at most half a step of int8, ``max / 254``; of fp8 (e4m3) it is 1/16 of the element, or
``max / 448 / 1024`` near zero. A block that holds inf or NaN is decoded to nothing finite, so an
overflow is still found. Sums are formed of decoded pieces, in the dtype of sums.

Sources: reductions as an exchange that is encoded once, ZeRO++ (Wang et al. 2023, arXiv
2306.10209, §3); blockwise scales, Dettmers et al. 2021 (arXiv 2110.02861, §2.1); e4m3,
Micikevicius et al. 2022 (arXiv 2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.protocol import rows_of

__all__ = ["QUANTISED", "Codec", "codec_of", "wire_nbytes"]

BLOCK = 256  # elements that share a scale, which adds 1.6% to their bytes
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of blocks, and the largest number of each."""


@dataclass(frozen=True)
class Codec:
    """Encodes pieces in blocks of ``dtype``."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded piece of ``numel`` elements: whole float32 words."""
        return 4 * (-(-numel // BLOCK) + -(-numel // 4))

    def encode(self, full: Tensor, pieces: int, encoded: Tensor) -> Tensor:
        """``[pieces * n] → [pieces * nbytes(n)]`` uint8, which is ``encoded``."""
        rows = zip(rows_of(full, pieces), rows_of(encoded, pieces), strict=True)
        for piece, row in rows:
            scales, values = self._parts(row, piece.numel())
            blocks = F.pad(piece.float(), (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
            tiny = torch.finfo(torch.float32).tiny  # instead of 0, by which nothing can be divided
            scales.copy_(blocks.abs().amax(1).div_(QUANTISED[self.dtype]).clamp_(min=tiny))
            blocks = blocks / scales[:, None]
            blocks = blocks.round_() if self.dtype is torch.int8 else blocks
            values.copy_(blocks.view(-1)[: piece.numel()].to(self.dtype))
        return encoded

    def decode(self, row: Tensor, numel: int) -> Tensor:
        """An encoded piece, ``[nbytes(numel)] → [numel]`` float32."""
        scales, values = self._parts(row, numel)
        blocks = F.pad(values.float(), (0, -numel % BLOCK)).view(-1, BLOCK)
        return blocks.mul_(scales[:, None]).view(-1)[:numel]

    def _parts(self, row: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales and the values of an encoded piece."""
        end = 4 * -(-numel // BLOCK)
        return row[:end].view(torch.float32), row[end : end + numel].view(self.dtype)


def codec_of(dtype: torch.dtype | None) -> Codec | None:
    """The codec of a dtype that is sent in blocks; ``None`` for others."""
    return Codec(dtype) if dtype is not None and dtype in QUANTISED else None


def wire_nbytes(dtype: torch.dtype, numel: int, pieces: int) -> int:
    """Bytes of ``numel`` elements that are sent in ``dtype``, in so many equal pieces."""
    codec = codec_of(dtype)
    return numel * dtype.itemsize if codec is None else pieces * codec.nbytes(numel // pieces)
