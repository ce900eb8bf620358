"""A pool never has more than its budget, and nobody waits for memory that is free."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.snapshot import MOST, Pool, budget_of
from shardwise.checkpoint.writer import Chunk


def chunk(*pieces: list[int], start: int = 0) -> Chunk:
    tensors = tuple(torch.tensor(piece, dtype=torch.uint8) for piece in pieces)
    return Chunk("file", start, start + sum(map(len, tensors)), tensors)


def large(value: int, nbytes: int = BLOCK) -> Chunk:
    return Chunk("file", 0, nbytes, (torch.full((nbytes,), value, dtype=torch.uint8),))


def test_a_copy_is_one_piece_and_does_not_change_with_the_original() -> None:
    pool, original = Pool(BLOCK), chunk([1, 2], [3], start=10)
    kept, _ = pool.keep(original)
    original.pieces[0].fill_(9)
    assert (kept.file, kept.start, kept.stop) == ("file", 10, 13)
    assert [piece.tolist() for piece in kept.pieces] == [[1, 2, 3]]


def test_small_chunks_share_a_slab() -> None:
    pool = Pool(100 * BLOCK)
    kept = [pool.keep(chunk([k]))[0] for k in range(100)]
    assert pool.nbytes == 4 * BLOCK
    assert [piece.item() for k in kept for piece in k.pieces] == list(range(100))


def test_slabs_are_used_again() -> None:
    pool = Pool(2 * BLOCK)
    for value in range(10):
        kept, slab = pool.keep(large(value))
        assert kept.pieces[0][-1] == value
        pool.give_back(slab)
        pool.rewind()
    assert pool.nbytes == BLOCK


def test_copying_waits_for_writing() -> None:
    pool = Pool(2 * BLOCK)
    slabs = [pool.keep(large(value))[1] for value in (1, 2)]
    got = threading.Event()

    def third() -> None:
        pool.keep(large(3))
        got.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not got.wait(0.05)
    pool.give_back(slabs[0])
    assert got.wait(60)
    thread.join()
    assert pool.nbytes == 2 * BLOCK


def test_one_slab_is_enough() -> None:
    """The slab that is being filled is given back by the writer before it is full."""
    pool = Pool(BLOCK)
    for value in range(5):
        _, slab = pool.keep(large(value, BLOCK // 2 + 1))
        pool.give_back(slab)
    assert pool.nbytes == BLOCK


def test_the_ranks_of_a_host_divide_a_quarter_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 << 18}  # 64 GiB
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert [budget_of(ranks) >> 30 for ranks in (1, 2, 8)] == [16, 8, 2]
    pages["SC_PHYS_PAGES"] = 2 << 28  # 2 TiB
    assert budget_of(8) == MOST
    pages["SC_PHYS_PAGES"] = 1000
    assert budget_of(8) == BLOCK


@pytest.mark.parametrize("budget", [0, 1, BLOCK - 1])
def test_less_than_a_block_is_refused(budget: int) -> None:
    with pytest.raises(sw.ConfigError, match="at least 4,194,304"):
        Pool(budget)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 17, 100])
def test_the_budget_is_never_exceeded(blocks: int) -> None:
    pool = Pool(blocks * BLOCK + 5)
    assert pool._most * pool._slab <= blocks * BLOCK + 5
    assert pool._most >= 1
