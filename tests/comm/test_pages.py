"""Tensors keep their addresses, and what one of them frees the next one fills."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.comm import pages as module
from shardwise.comm.memory import Memory
from shardwise.comm.pages import LARGE, PIECE, Pages

MIB = 1 << 20
KINDS = {"blocks of whole pieces": 8 * MIB, "and of a rest": 9 * MIB + 4}


def resident() -> int:
    """Bytes of memory that this process does not share."""
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous"))


def faults_of_writing(tensor: Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def lent(pages: Pages, nbytes: int) -> Tensor:
    return pages.tensor(nbytes, torch.uint8)


def free(pages: Pages, nbytes: int) -> tuple[Tensor, int]:
    tensor = lent(pages, nbytes)
    pages.take(tensor.data_ptr())
    return tensor, tensor.data_ptr()


@pytest.mark.parametrize("nbytes", KINDS.values(), ids=KINDS)
def test_what_one_tensor_frees_the_next_one_fills(nbytes: int) -> None:
    pages = Pages()
    (first, at_first), (second, at_second) = free(pages, nbytes), free(pages, nbytes)
    view = second[5:]
    pages.lend(at_first)
    assert faults_of_writing(first) >= nbytes >> 12
    before = resident()
    for _ in range(3):
        pages.take(at_first)
        pages.lend(at_second)
        assert faults_of_writing(second) < 100
        pages.take(at_second)
        pages.lend(at_first)
        assert faults_of_writing(first) < 100
    assert resident() - before < MIB
    assert (second.data_ptr(), view.data_ptr()) == (at_second, at_second + 5)


def test_a_tensor_of_another_size_gets_the_pieces_that_there_are() -> None:
    pages = Pages()
    (small, at_small), (large, _) = free(pages, 2 * PIECE), free(pages, 3 * PIECE)
    pages.lend(at_small)
    small.fill_(1)
    pages.take(at_small)
    before = resident()
    pages.lend(large.data_ptr())
    large.fill_(2)
    assert resident() - before < PIECE + MIB
    assert large.float().mean() == 2


def test_rests_of_nearly_the_same_size_share_their_pages() -> None:
    pages = Pages()
    (small, at_small), (large, _) = free(pages, 9 * LARGE // 4), free(pages, 11 * LARGE // 4)
    pages.lend(at_small)
    small.fill_(1)
    pages.take(at_small)
    pages.lend(large.data_ptr())
    assert faults_of_writing(large) < (LARGE // 2 >> 12) + 100


def test_pages_of_a_tensor_that_died_are_kept_until_no_tensor_is_left_or_they_are_trimmed() -> None:
    pages = Pages()
    before = resident()
    lasting, passing = (lent(pages, 8 * MIB).fill_(1) for _ in range(2))
    del passing
    assert resident() - before > 15 * MIB
    assert faults_of_writing(lent(pages, 8 * MIB)) < 100
    pages.trim()
    assert resident() - before < 9 * MIB
    del lasting
    assert resident() - before < MIB


def test_memory_of_a_dead_tensor_is_the_next_ones_of_its_size_and_its_pages_are_anyones() -> None:
    pages = Pages()
    lasting, first = lent(pages, 8 * MIB), lent(pages, 8 * MIB + 1).fill_(1)
    start = first.data_ptr()
    del first
    before = resident()
    second = lent(pages, 8 * MIB + 5)
    assert second.data_ptr() == start
    assert faults_of_writing(second) < 100
    del second
    assert faults_of_writing(lent(pages, 2 * PIECE)) < 100
    assert resident() - before < MIB
    assert lasting.fill_(3).float().mean() == 3


def test_where_the_kernel_moves_no_pages_memory_is_freed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_mremap", lambda *_: module._FAILED)
    pages = Pages()
    before = resident()
    tensor = lent(pages, 8 * MIB).fill_(1)
    start = tensor.data_ptr()
    pages.take(start)
    assert resident() - before < MIB
    pages.lend(start)
    assert tensor.fill_(3).float().mean() == 3


def test_large_memory_that_is_gathered_or_sent_is_such_memory_on_a_cpu_that_shares_none() -> None:
    memory = Memory(torch.device("cpu"))
    large, small = LARGE // 4, LARGE // 4 - 1
    tensors = [
        kind(numel, torch.float32)
        for kind in (memory.full, memory.gradient, memory.shard)
        for numel in (large, small)
    ]
    assert [module.pages.holds(tensor.data_ptr()) for tensor in tensors] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]


def test_a_large_full_bucket_keeps_its_storage_while_it_is_free() -> None:
    memory = Memory(torch.device("cpu"))
    with torch.inference_mode():
        full = memory.full(LARGE, torch.float32)
    view, storage = full[2:5], full.untyped_storage()
    start = full.data_ptr()
    for _ in range(2):
        memory.free(storage)
        memory.refill(storage, full.nbytes)
        full.copy_(torch.arange(float(LARGE)))
        assert view.tolist() == [2.0, 3.0, 4.0]
    assert (full.data_ptr(), full.is_inference()) == (start, False)


def test_a_full_bucket_that_was_never_free_keeps_its_values_where_it_is_refilled() -> None:
    memory = Memory(torch.device("cpu"))
    full = memory.full(LARGE, torch.float32).fill_(2)
    memory.free(memory.gradient(LARGE, torch.float32).fill_(1).untyped_storage())
    memory.refill(full.untyped_storage(), full.nbytes)
    assert bool((full == 2).all())
