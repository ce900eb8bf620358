"""What tells changed bytes from written ones: CRC-32, of blocks that several ranks wrote.

    CRC-32 2.4 GB/s    SHA-256 1.3    SHA-1 1.2    BLAKE2b 1.0    (one core, Python 3.11)

A checkpoint is checked against accident, not against an enemy, who would rewrite the manifest,
too. CRC-32 finds every change of one or two bits and every burst of up to 32 in a block, and
misses one in 2^32 of all others. It is the fastest in the standard library by a factor of two,
and the only one that can be *combined*: from the checksums of two neighbours follows that of both,
without their bytes. So ranks that write parts of one block need not read each other's.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from shardwise.checkpoint.plan import BLOCK, cut_at_blocks
from shardwise.errors import CheckpointError

__all__ = ["Piece", "block_checksums", "combined", "digest_of", "of_bytes", "running"]

Piece = tuple[int, int, int]
"""``(start, stop, checksum)`` of bytes of a file that lie in one block."""

_POLYNOMIAL = 0xEDB88320  # of CRC-32 (IEEE 802.3), its lowest power in the highest bit


def running(buffer: Any, so_far: int = 0) -> int:
    """The checksum of ``buffer`` (anything with contiguous bytes) after what came before it."""
    return zlib.crc32(buffer, so_far)


def of_bytes(data: bytes | memoryview) -> list[int]:
    """The checksum of each block of a whole file."""
    view = memoryview(data)
    return [running(view[lo:hi]) for lo, hi in cut_at_blocks(0, len(view))]


def digest_of(blocks: Sequence[int], size: int) -> str:
    """One text for a whole file: SHA-256 of its size and its blocks' checksums."""
    return hashlib.sha256(f"{size} {' '.join(map(str, blocks))}".encode()).hexdigest()


def block_checksums(pieces: Iterable[Piece], size: int, file: str) -> list[int]:
    """Of each block of a file, from pieces that many ranks wrote.

    Raises:
        CheckpointError: they leave a hole or overlap, so somebody's bytes are missing.
    """
    blocks: list[int] = []
    at = 0
    for start, stop, checksum in sorted(pieces):
        if start != at or not start < stop <= min(size, (start // BLOCK + 1) * BLOCK):
            raise _not_gapless(file, at, start)
        if start % BLOCK == 0:
            blocks.append(checksum)
        else:
            blocks[-1] = combined(blocks[-1], checksum, stop - start)
        at = stop
    if at != size:
        raise _not_gapless(file, at, size)
    return blocks


def _not_gapless(file: str, at: int, start: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: the next byte to be written was {at:,}, and the next that a rank says it wrote "
        f"is {start:,}. The checkpoint is not published. This is a mistake of shardwise: please "
        "report it, with the strategy and the number of ranks."
    )


def combined(first: int, second: int, length: int) -> int:
    """The checksum of two neighbours from each one's, where the second has ``length`` bytes.

    CRC(A B) = CRC(A) x^(8 length) + CRC(B) over the polynomials modulo 2 (as zlib's own
    ``crc32_combine``, which Python does not offer).
    """
    return _times(_power(8 * length), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
    """The power of x, modulo the polynomial."""
    result, base = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            result = _times(base, result)
        base = _times(base, base)
        exponent >>= 1
    return result
