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
        """``[pieces * n] → [pieces * nbytes(n)]`` uint8, which is ``encoded``.

        On a device all pieces at once, since launches cost more; on CPU one that fits in a cache.
        """
        at_once, numel = 1 if full.is_cpu else pieces, full.numel() // pieces
        rows = rows_of(full, pieces).split(at_once), rows_of(encoded, pieces).split(at_once)
        for some, out in zip(*rows, strict=True) if numel else ():
            scales, values = self._parts(out, numel)
            blocks = _in_blocks(some)
            tiny = torch.finfo(torch.float32).tiny  # instead of 0, by which nothing can be divided
            scales.copy_(blocks.abs().amax(2).div_(QUANTISED[self.dtype]).clamp_(min=tiny))
            blocks = blocks / scales[:, :, None]
            blocks = blocks.round_() if self.dtype is torch.int8 else blocks
            values.copy_(blocks.flatten(1)[:, :numel].to(self.dtype))
        return encoded

    def decode(self, rows: Tensor, numel: int) -> Tensor:
        """Encoded pieces, ``[W, nbytes(numel)] → [W, numel]`` float32."""
        if not numel:
            return rows.float()
        scales, values = self._parts(rows, numel)
        return _in_blocks(values).mul_(scales[:, :, None]).flatten(1)[:, :numel]

    def _parts(self, rows: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales and the values of encoded pieces."""
        end = 4 * -(-numel // BLOCK)
        return rows[:, :end].view(torch.float32), rows[:, end : end + numel].view(self.dtype)


def _in_blocks(rows: Tensor) -> Tensor:
    """``[W, n] → [W, blocks, 256]`` float32, the last one padded with zeros."""
    count, numel = rows.shape
    return F.pad(rows.float(), (0, -numel % BLOCK)).view(count, -(-numel // BLOCK), BLOCK)


def codec_of(dtype: torch.dtype) -> Codec | None:
    """The codec of a dtype that is sent in blocks; ``None`` for others."""
    return Codec(dtype) if dtype in QUANTISED else None


def wire_nbytes(dtype: torch.dtype, numel: int, pieces: int) -> int:
    """Bytes of ``numel`` elements that are sent in ``dtype``, in so many equal pieces."""
    codec = codec_of(dtype)
    return numel * dtype.itemsize if codec is None else pieces * codec.nbytes(numel // pieces)
