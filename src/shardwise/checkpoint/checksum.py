"""CRC-32 of blocks that several ranks wrote: it tells changed bytes from those that were written.

It protects against accident, not against an attacker, who would rewrite the manifest, too. CRC-32
finds every change of one or two bits and every burst of up to 32 in a block, and misses one in 2^32
of all others. The checksums of two neighbours can be *combined* into that of both, without their
bytes, so ranks that write parts of one block need not read each other's. zlib-ng computes it at the
speed of memory (23 GB/s; zlib 4), and lets other threads run meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from zlib_ng.zlib_ng import crc32, crc32_combine

from shardwise.checkpoint.plan import BLOCK
from shardwise.errors import CheckpointError
from shardwise.plan.layout.layout import cut_at_multiples

__all__ = ["Piece", "block_checksums", "crc32", "digest_of", "of_bytes"]

Piece = tuple[int, int, int]
"""``(start, stop, checksum)`` of bytes of a file that lie in one block."""


def of_bytes(data: bytes | memoryview, block: int = BLOCK) -> list[int]:
    """The checksum of each block of a whole file."""
    view = memoryview(data)
    return [crc32(view[start:stop]) for start, stop in cut_at_multiples(0, len(view), block)]


def digest_of(blocks: Sequence[int], size: int) -> str:
    """One text for a whole file: SHA-256 of its size and its blocks' checksums."""
    return hashlib.sha256(f"{size} {' '.join(map(str, blocks))}".encode()).hexdigest()


def block_checksums(pieces: Iterable[Piece], size: int, file: str, block: int = BLOCK) -> list[int]:
    """The checksum of each block of a file, from pieces that many ranks wrote."""
    blocks: list[int] = []
    at = 0
    for start, stop, checksum in sorted(pieces):
        if start != at or not start < stop <= min(size, (start // block + 1) * block):
            raise _not_gapless(file, at, start)
        if start % block == 0:
            blocks.append(checksum)
        else:
            blocks[-1] = crc32_combine(blocks[-1], checksum, stop - start)
        at = stop
    if at != size:
        raise _not_gapless(file, at, size)
    return blocks


def _not_gapless(file: str, at: int, start: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: byte {at:,} was to be written next, but a rank reports byte {start:,}. The "
        "checkpoint is not published. This is a bug in shardwise: please report it, with the "
        "strategy and the number of ranks."
    )
