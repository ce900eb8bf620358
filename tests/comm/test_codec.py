"""Blocks of 8-bit numbers: how far off an element may be, what is kept, and what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.comm.codec import BLOCK, QUANTISED, Codec, wire_nbytes
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.reduction import Reduction, _sum_decoded
from shardwise.comm.transports.local import LocalComm
from tests.comm.transports.test_backend import Named
from tests.nets import numbers
from tests.ranks import run_threads

INT8, FP8 = torch.int8, torch.float8_e4m3fn
EACH = pytest.mark.parametrize("dtype", QUANTISED, ids=str)


def rounded(codec: Codec, piece: Tensor) -> Tensor:
    """``piece``, ``[n]``, encoded and decoded, in its dtype."""
    row = piece.new_empty(codec.nbytes(piece.numel()), dtype=torch.uint8)
    return codec.decode(codec.encode(piece, 1, row)[None], piece.numel())[0].to(piece.dtype)


def largest(piece: Tensor) -> Tensor:
    """The largest magnitude of each element's block."""
    blocks = [block.abs().max().expand_as(block) for block in piece.split(BLOCK)]
    return torch.cat(blocks)


def bound(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """How far off an element may be; a little more, for the scale is rounded, too."""
    if dtype is INT8:
        return 1.0001 * largest(piece) / 254
    return 1.0001 * torch.maximum(piece.abs() / 16, largest(piece) / 448 / 1024)


@EACH
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_an_element_is_off_by_no_more_than_the_bound(
    dtype: torch.dtype, numel: int, magnitude: float
) -> None:
    piece = magnitude * numbers(numel, (numel,)) ** 3
    error = (rounded(Codec(dtype), piece) - piece).abs()
    assert (error <= bound(piece, dtype)).all()
    nearest = (error / bound(piece, dtype)).max()
    assert numel < 256 or nearest > 0.9, "a bound that says little"


@EACH
def test_a_block_knows_nothing_of_the_others(dtype: torch.dtype) -> None:
    piece = torch.cat([numbers(0, (BLOCK,)), 1e6 * numbers(1, (BLOCK,))])
    assert torch.equal(rounded(Codec(dtype), piece)[:BLOCK], rounded(Codec(dtype), piece[:BLOCK]))


@EACH
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_finite_afterwards(dtype: torch.dtype, value: float) -> None:
    """A loss scaler must find it, and training must not go on with numbers made of it."""
    piece = numbers(0, (3 * BLOCK,))
    piece[BLOCK + 3] = value
    decoded = rounded(Codec(dtype), piece)
    assert not decoded[BLOCK + 3].isfinite()
    assert decoded[:BLOCK].isfinite().all()


@EACH
def test_zeros_and_the_smallest_numbers_are_no_trouble(dtype: torch.dtype) -> None:
    assert rounded(Codec(dtype), torch.zeros(300)).eq(0).all()
    assert rounded(Codec(dtype), torch.full((300,), 1e-45)).abs().max() < 1e-37
    assert rounded(Codec(dtype), torch.zeros(0)).numel() == 0


@EACH
def test_4096_elements_take_a_quarter_of_float32_and_64_bytes_of_scales(dtype: torch.dtype) -> None:
    assert Codec(dtype).nbytes(4096) == 4096 + 64
    assert wire_nbytes(dtype, 4 * 4096, pieces=4) == 4 * (4096 + 64)
    assert wire_nbytes(torch.bfloat16, 4 * 4096, pieces=4) == 2 * 4 * 4096


# ---- in collectives ------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("world", [2, 3])
def test_a_reduction_is_the_wide_sum_of_what_was_rounded_once(
    dtype: torch.dtype, world: int
) -> None:
    numel = 1000
    buckets = [numbers(rank, (world * numel,)) for rank in range(world)]
    codec, truth = Codec(dtype), []
    for piece in range(world):
        addends = [rounded(codec, full.view(world, numel)[piece]) for full in buckets]
        truth.append(sum(addends[1:], addends[0]) / world)

    def rank(comm: Comm) -> None:
        reduction = Reduction(dtype, torch.float32, after=float(world))
        reducing = reduction.start(buckets[comm.rank].clone(), comm, Label("reduce"))
        reducing.pending.wait()
        assert torch.equal(reducing.out, truth[comm.rank])
        assert comm.counters.bytes_sent == {"reduce": (world - 1) * codec.nbytes(numel)}

    run_threads(world, rank)


@EACH
def test_one_rank_alone_sends_and_rounds_nothing(dtype: torch.dtype) -> None:
    full = numbers(0, (300,))
    reducing = Reduction(dtype, torch.float32).start(full.clone(), LocalComm(), Label("reduce"))
    assert torch.equal(reducing.out, full)


def operations(pieces: int, device: str) -> int:
    """That encode a bucket, and those that sum it."""
    codec, n = Codec(INT8), 300
    full = torch.empty(pieces * n, device=device)
    encoded = full.new_empty(pieces * codec.nbytes(n), dtype=torch.uint8)
    with Named() as mode:
        rows = codec.encode(full, pieces, encoded).view(pieces, -1)
        _sum_decoded(full.new_empty(n), codec, 1.0, rows)
    return len(mode.names)


def test_on_a_device_a_bucket_takes_as_many_operations_at_64_ranks_as_at_4() -> None:
    assert operations(64, "meta") == operations(4, "meta") < operations(4, "cpu")
