"""Memory that processes share: what a block is, and when it is given out again."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from shardwise.comm.transports import arena as module
from shardwise.comm.transports.arena import PAGE, Arena, Heap, SymmetricHeap
from shardwise.comm.transports.shared_memory import _bytes_for


def test_two_mappings_of_one_file_show_the_same_bytes() -> None:
    mine = Arena.create()
    opened = Arena.open(os.getpid(), mine.fd)
    mine.tensor(4096, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert opened.tensor(4096, 3, torch.float32).tolist() == [1.0, 2.0, 3.0]


def test_a_file_has_a_tebibyte_and_takes_memory_only_where_it_is_touched() -> None:
    arena = Arena.create()
    assert os.fstat(arena.fd).st_size == 1 << 40
    arena.tensor(1 << 38, 1, torch.uint8).fill_(1)
    assert os.fstat(arena.fd).st_blocks * 512 <= 4 * PAGE


def test_address_space_that_garbage_holds_is_taken_back() -> None:
    gc.disable()
    try:
        for _ in range(140):  # each maps a tebibyte, and a process has 128
            arena = Arena.create()
            arena.itself = arena  # type: ignore[attr-defined]
            arena.close_file()
    finally:
        gc.enable()


def test_a_file_has_no_name_that_could_be_left_behind() -> None:
    assert "(deleted)" in str(Path(f"/proc/self/fd/{Arena.create().fd}").readlink())


def test_a_file_of_nobody_cannot_be_opened() -> None:
    with pytest.raises(OSError, match="No such"):
        Arena.open(os.getpid(), 1_000_000)


def test_a_tensor_is_known_by_its_offset_and_others_have_none() -> None:
    arena = Arena.create()
    assert arena.offset_of(arena.tensor(8192, 4, torch.int64)[1:]) == 8200
    assert arena.offset_of(torch.zeros(4)) is None


def test_each_tensor_has_a_storage_of_its_own() -> None:
    # Otherwise saving one would save the whole file.
    arena = Arena.create()
    assert arena.tensor(0, 5, torch.bfloat16).untyped_storage().nbytes() == 10
    assert heap(set()).allocate(5, torch.bfloat16).untyped_storage().nbytes() == 10
    assert arena.tensor(0, 0, torch.bfloat16).shape == (0,)


def heap(being_read: set[int]) -> Heap:
    return Heap(Arena.create(), being_read.__contains__)


def test_a_block_is_given_out_again_once_its_tensor_and_all_views_are_gone() -> None:
    own = heap(set())
    first = own.allocate(100, torch.float32)
    view, place = first[10:], first.data_ptr()
    del first
    second = own.allocate(100, torch.float32)
    assert second.data_ptr() != place
    del view
    assert own.allocate(100, torch.float32).data_ptr() == place


def test_a_block_that_peers_still_read_is_not_given_out() -> None:
    being_read = {7}
    own = heap(being_read)
    _before, shown, _after = (own.allocate(100, torch.float32) for _ in range(3))
    place = shown.data_ptr()
    own.mark_read_in(own.arena.offset_of(shown[3:]) or 0, 7)  # from its middle
    del shown
    other = own.allocate(100, torch.float32)
    assert other.data_ptr() != place
    being_read.clear()
    assert own.allocate(100, torch.float32).data_ptr() == place


def test_a_large_block_that_a_peer_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So gradient buckets are two: one is written while the other is read."""
    looks = [True, True, False]
    own = Heap(Arena.create(), lambda _: not looks or looks.pop(0))
    bucket = own.allocate(module.AWAITED, torch.uint8)
    own.mark_read_in(place := own.arena.offset_of(bucket) or 0, 7)
    del bucket
    again = own.allocate(module.AWAITED, torch.uint8)
    assert (own.arena.offset_of(again), looks) == (place, [])
    own.mark_read_in(place, 8)
    del again
    monkeypatch.setattr(module, "PATIENCE", 0.0)  # a peer that never reads it stops nobody
    assert own.arena.offset_of(own.allocate(module.AWAITED, torch.uint8)) != place


def test_trimmed_blocks_give_their_memory_back_and_make_place_for_other_sizes() -> None:
    being_read = {7}
    own = heap(being_read)
    kept, shown, *freed = (own.allocate(2 * PAGE, torch.uint8).fill_(1) for _ in range(5))
    own.mark_read_in(own.arena.offset_of(shown) or 0, 7)
    del shown
    freed.clear()
    own.trim()
    assert os.fstat(own.arena.fd).st_blocks * 512 == 4 * PAGE  # what lives, and what is read
    assert own.arena.offset_of(own.allocate(6 * PAGE, torch.uint8)) == 4 * PAGE
    assert kept.sum() == 2 * PAGE
    being_read.clear()
    own.trim()
    assert own.arena.offset_of(own.allocate(1, torch.uint8)) == 2 * PAGE


def test_sixty_four_ranks_of_a_host_fit_in_the_address_space_of_each() -> None:
    arenas = [Arena.create(_bytes_for(64)) for _ in range(65)]
    for arena in arenas:
        arena.close_file()
        arena.tensor(arena.size - 4, 1, torch.float32).fill_(1.0)
    assert sum(arena.size for arena in arenas) < 1 << 43
    assert _bytes_for(2) == 1 << 40
    mapped = Path("/proc/self/maps").read_text().count("memfd:shardwise")
    del arena, arenas
    assert Path("/proc/self/maps").read_text().count("memfd:shardwise") == mapped - 65


def test_blocks_do_not_overlap_and_begin_on_pages() -> None:
    own = heap(set())
    blocks = [own.allocate(numel, torch.uint8) for numel in (1, PAGE, PAGE + 1, 3)]
    places = [own.arena.offset_of(block) for block in blocks]
    assert places == [0, PAGE, 2 * PAGE, 4 * PAGE]


def test_nothing_takes_no_block() -> None:
    own = heap(set())
    assert own.allocate(0, torch.float32).numel() == 0
    assert own.arena.offset_of(own.allocate(1, torch.uint8)) == 0


# --- blocks that are the same on every rank --------------------------------------------------


def starts(common: SymmetricHeap, *pages: int) -> list[int]:
    """Where blocks of so many pages begin, in pages; they die at once."""
    blocks = [common.allocate(PAGE * count, torch.uint8) for count in pages]
    return [(common._arena.offset_of(block) or 0) // PAGE for block in blocks]


def test_a_common_block_is_given_out_again_only_once_all_ranks_have_let_it_go() -> None:
    common = SymmetricHeap(Arena.create(), PAGE)
    assert starts(common, 1, 2) == [1, 2]
    assert common.unused == {PAGE, 2 * PAGE}  # on this rank
    assert starts(common, 1) == [4]
    common.reuse([2 * PAGE])
    assert common.unused == {PAGE, 4 * PAGE}
    assert starts(common, 3, 2) == [5, 2]  # the first gap is too small for 3, and just fits 2
    assert [start for start, _ in common._ranges.free] == [8 * PAGE]


def test_common_blocks_are_merged_so_another_layout_fits_in_the_place_of_the_one_before() -> None:
    common = SymmetricHeap(Arena.create(), 0)
    for layout in ([3, 1, 2], [2, 2, 2], [1, 5], [6]):
        assert starts(common, *layout)[0] == 0
        common.reuse(set(common.unused))
        assert common._ranges.free[0][0] == 0
    assert len(common._ranges.free) == 1


def test_a_common_block_lives_as_long_as_a_view_of_it() -> None:
    common = SymmetricHeap(Arena.create(), 0)
    view = common.allocate(10, torch.float32)[3:]
    assert common.unused == set()
    assert view.untyped_storage().nbytes() == 40  # or saving it would save the whole file
    del view
    assert common.unused == {0}


def test_nothing_takes_no_common_block_either() -> None:
    common = SymmetricHeap(Arena.create(), 0)
    nothing = common.allocate(0, torch.bfloat16)
    assert (nothing.shape, nothing.dtype) == ((0,), torch.bfloat16)
    assert common._sizes == {}
