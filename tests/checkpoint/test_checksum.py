"""Checksums of blocks, from pieces of any number of writers."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import checksum
from shardwise.checkpoint.checksum import (
    _FAR,
    _NEAR,
    block_checksums,
    combined,
    digest_of,
    of_bytes,
    running,
)
from shardwise.checkpoint.plan import BLOCK
from shardwise.errors import CheckpointError


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_two_neighbours_follows_from_each_ones(one: bytes, two: bytes) -> None:
    assert combined(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


@pytest.mark.parametrize(
    "length", [0, 1, _FAR, 2 * _FAR - 1, 2 * _FAR, 2 * _FAR + 1, BLOCK, BLOCK + 17]
)
def test_it_is_zlibs_checksum_however_long_the_bytes_are(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert running(data) == zlib.crc32(data)
    assert running(memoryview(data), 1234) == zlib.crc32(data, 1234)


def test_folding_begins_anew_with_each_call_and_in_each_thread() -> None:
    blocks = [random.Random(k).randbytes(BLOCK // 2) for k in range(6)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(running, blocks)) == [zlib.crc32(block) for block in blocks]


def test_the_two_distances_are_those_of_a_trinomial_that_crc_32_divides() -> None:
    """So a byte may be moved: its own checksum is that of the two that it is added to."""
    one = zlib.crc32(b"\1" + bytes(_FAR))
    two = bytearray(1 + _FAR)
    two[_NEAR], two[_FAR] = 1, 1
    zeros = zlib.crc32(bytes(1 + _FAR))
    assert one ^ zeros == zlib.crc32(two) ^ zeros


def test_long_neighbours_combine_as_well() -> None:
    data = random.Random(0).randbytes(BLOCK)
    for cut in (1, 4096, 1 << 20, BLOCK - 1):
        whole = combined(zlib.crc32(data[:cut]), zlib.crc32(data[cut:]), BLOCK - cut)
        assert whole == zlib.crc32(data)


def test_pieces_of_many_writers_give_the_checksums_of_the_whole() -> None:
    data = random.Random(1).randbytes(2 * BLOCK + 1234)
    cuts = sorted([0, 7, 4096, BLOCK, BLOCK + 1, BLOCK + 9000, 2 * BLOCK, len(data)])
    pairs = pairwise(cuts)
    pieces = [(lo, hi, running(data[lo:hi])) for lo, hi in pairs]
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
    assert digest_of([], 0) == digest_of([], 0)
