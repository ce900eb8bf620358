"""Checksums of blocks, from pieces of any number of writers."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest

from shardwise.checkpoint import checksum
from shardwise.checkpoint.checksum import block_checksums, crc32, digest_of, of_bytes
from shardwise.checkpoint.plan import BLOCK
from shardwise.errors import CheckpointError


def test_it_is_zlibs_checksum() -> None:
    data = random.Random(0).randbytes(BLOCK + 17)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data), 1234) == zlib.crc32(data, 1234)


def test_pieces_of_many_writers_give_the_checksums_of_the_whole() -> None:
    data = random.Random(1).randbytes(2 * BLOCK + 1234)
    cuts = sorted([0, 7, 4096, BLOCK, BLOCK + 1, BLOCK + 9000, 2 * BLOCK, len(data)])
    pairs = pairwise(cuts)
    pieces = [(lo, hi, crc32(data[lo:hi])) for lo, hi in pairs]
    random.Random(2).shuffle(pieces)
    assert block_checksums(pieces, len(data), "file") == of_bytes(data)
    assert of_bytes(data) == [zlib.crc32(data[k : k + BLOCK]) for k in range(0, len(data), BLOCK)]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(0, 90, 1)],
        [(10, 100, 1)],
        [(0, 50, 1), (60, 100, 1)],
        [(0, 60, 1), (50, 100, 1)],
        [(0, 50, 1), (0, 50, 1), (50, 100, 1)],
        [(0, 100, 1), (100, 110, 1)],
    ],
)
def test_a_hole_or_an_overlap_is_an_error(pieces: list[checksum.Piece]) -> None:
    with pytest.raises(CheckpointError, match="not published"):
        block_checksums(pieces, 100, "file")


def test_a_piece_that_crosses_blocks_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="not published"):
        block_checksums([(0, BLOCK + 1, 1)], BLOCK + 1, "file")


def test_the_digest_of_a_file_knows_order_and_size() -> None:
    assert digest_of([1, 2], 10) != digest_of([2, 1], 10)
    assert digest_of([1, 2], 10) != digest_of([1, 2], 11)
