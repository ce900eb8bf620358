"""Every byte is written once, by a rank that holds it or is sent it; pages have one writer."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.plan import (
    BLOCK,
    Entry,
    FilePlan,
    Held,
    Move,
    Span,
    block_size,
    index_files,
    plan_files,
)
from shardwise.checkpoint.safetensors_format import PAGE, dtype_of
from shardwise.errors import CheckpointError
from shardwise.plan.layout import layout
from shardwise.plan.layout.solver import solve


def entry(name: str, shape: tuple[int, ...], cuts: list[int], dtype: str = "F32") -> Entry:
    """Rank r holds elements ``cuts[r]`` to ``cuts[r + 1]``."""
    pairs = enumerate(pairwise(cuts))
    held = tuple(Held(lo, hi, (rank,)) for rank, (lo, hi) in pairs if lo < hi)
    return Entry(name, dtype, shape, held)


def one(entries: list[Entry]) -> FilePlan:
    (file,) = plan_files("model", entries, 1 << 60)
    return file


def test_a_rank_writes_its_shard_of_a_bucket_as_one_range() -> None:
    # Two slots of one bucket: rank 0 holds the first and a piece of the second.
    file = one([entry("a", (2048,), [0, 2048, 2048]), entry("b", (3072,), [0, 1024, 3072])])
    assert [(s.start, s.stop) for s in file.tensors.values()] == [(4096, 12288), (12288, 24576)]
    assert file.spans == (Span(4096, 16384, 0), Span(16384, 24576, 1))
    assert file.moves == ()


def test_a_page_belongs_to_the_rank_of_its_first_byte() -> None:
    # Rank 1 holds 1,000 floats from the middle of a page; those in it move to rank 0.
    file = one([entry("a", (2500,), [0, 500, 1500, 2500])])
    assert file.spans == (Span(4096, 8192, 0), Span(8192, 12288, 1), Span(12288, 14096, 2))
    assert file.moves == (Move(6096, 8192, 1, 0), Move(10096, 12288, 2, 1))


def test_ranks_whose_bytes_lie_in_a_page_of_another_write_nothing() -> None:
    file = one([entry("a", (8,), [0, 2, 4, 6, 8])])
    assert file.spans == (Span(4096, 4128, 0),)
    assert file.moves == (Move(4104, 4112, 1, 0), Move(4112, 4120, 2, 0), Move(4120, 4128, 3, 0))


def test_ranks_that_hold_the_same_share_the_writing_in_whole_pages() -> None:
    file = one([Entry("a", "F32", (4096, 3), (Held(0, 12288, (0, 1, 2)),))])
    assert file.spans == (Span(4096, 20480, 0), Span(20480, 36864, 1), Span(36864, 53248, 2))
    assert file.moves == ()


def test_copies_of_shards_share_the_writing_of_their_shard() -> None:
    """As on a mesh of two copies of two shards, which needs no other format."""
    ranges = (Held(0, 8192, (0, 2)), Held(8192, 16384, (1, 3)))
    file = one([Entry("a", "U8", (16384,), ranges)])
    first = [(span.start - 4096, span.rank) for span in file.spans]
    assert first == [(0, 0), (4096, 2), (8192, 1), (12288, 3)]


def test_wide_dtypes_come_first_so_that_all_are_aligned() -> None:
    entries = [
        entry("mask", (3,), [0, 3], "BOOL"),
        entry("half", (3,), [0, 3], "BF16"),
        entry("count", (), [0, 1], "I64"),
        entry("full", (3,), [0, 3], "F32"),
    ]
    file = one(entries)
    assert list(file.tensors) == ["count", "full", "half", "mask"]
    assert all(s.start % dtype_of(s.dtype).itemsize == 0 for s in file.tensors.values())


def test_files_are_named_as_hugging_face_libraries_expect() -> None:
    entries = [entry(name, (1000,), [0, 1000]) for name in "abc"]
    files = plan_files("model", entries, 8000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.name for file in files] == names
    assert json.loads(index_files({"model": files})["model.safetensors.index.json"]) == {
        "metadata": {"total_size": 12000},
        "weight_map": {"a": names[0], "b": names[0], "c": names[1]},
    }
    one = plan_files("model", entries, 12000)
    assert [file.name for file in one] == ["model.safetensors"]
    assert index_files({"model": one}) == {}


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own() -> None:
    entries = [entry("a", (10,), [0, 10]), entry("b", (1000,), [0, 1000]), entry("c", (5,), [0, 5])]
    assert [list(f.tensors) for f in plan_files("model", entries, 100)] == [["a"], ["b"], ["c"]]


def test_two_tensors_of_one_name_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="two tensors would be stored as 'a'"):
        plan_files("model", [entry("a", (1,), [0, 1])] * 2, 100)


# --- for any tensors and any ranks -----------------------------------------------------------

SHAPES = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 53]), max_size=2).map(tuple), min_size=1, max_size=6
)
DTYPES = st.sampled_from(["F64", "F32", "BF16", "U8"])


@st.composite
def some_entries(draw: st.DrawFn, world: int) -> list[Entry]:
    """Any tensors, each cut anyhow between the ranks, or held by all, or by rank 0 alone."""
    entries = []
    for k, shape in enumerate(draw(SHAPES)):
        numel, dtype = prod(shape), draw(DTYPES)
        way = draw(st.sampled_from(["cut", "all", "first"]))
        if way == "cut":
            inner = draw(st.lists(st.integers(0, numel), min_size=world - 1, max_size=world - 1))
            entries.append(entry(f"t{k}", shape, [0, *sorted(inner), numel], dtype))
        else:
            ranks = tuple(range(world)) if way == "all" else (0,)
            ranges = (Held(0, numel, ranks),) if numel else ()
            entries.append(Entry(f"t{k}", dtype, shape, ranges))
    return entries


def holders(file: FilePlan, entries: list[Entry]) -> list[set[int]]:
    """Who holds each byte of the file's data."""
    held: list[set[int]] = [set() for _ in range(file.size - len(file.header))]
    for e in entries:
        if e.name not in file.tensors:
            continue
        first, item = file.tensors[e.name].start - len(file.header), dtype_of(e.dtype).itemsize
        for lo, hi, ranks in e.held:
            for byte in range(first + lo * item, first + hi * item):
                held[byte].update(ranks)
    return held


def check(files: tuple[FilePlan, ...], entries: list[Entry]) -> None:
    for file in files:
        held, base = holders(file, entries), len(file.header)
        assert base % PAGE == 0
        assert all(held)  # else the entries themselves were wrong
        writers = [-1] * len(held)
        for start, stop, rank in file.spans:
            assert start % PAGE == 0
            assert stop % PAGE == 0 or stop == file.size
            for byte in range(start - base, stop - base):
                assert writers[byte] == -1  # once
                writers[byte] = rank
        assert -1 not in writers  # and none is forgotten
        arrives = [{rank} & ranks for rank, ranks in zip(writers, held, strict=True)]
        for start, stop, source, writer in file.moves:
            for byte in range(start - base, stop - base):
                assert writers[byte] == writer
                assert source in held[byte]
                assert not arrives[byte]
                arrives[byte] = {writer}
        assert all(arrives)  # each writer holds it or is sent it, and nothing is sent in vain


@given(st.integers(1, 9).flatmap(some_entries), st.sampled_from([3000, 1 << 40]))
def test_every_byte_is_written_exactly_once(entries: list[Entry], limit: int) -> None:
    files = plan_files("model", entries, limit)
    assert sorted(name for file in files for name in file.tensors) == sorted(
        e.name for e in entries
    )
    check(files, entries)


@given(st.integers(1, 9), SHAPES)
def test_a_layouts_shards_are_one_range_each(world: int, shapes: list[tuple[int, ...]]) -> None:
    """What the engine cuts, cut as the engine does: W - 1 boundaries, none of them longer."""
    specs = [layout.Slot(f"t{k}", shape) for k, shape in enumerate(shapes)]
    solved = solve(specs, world)
    entries = [
        Entry(
            slot.name,
            "F32",
            slot.shape,
            tuple(Held(*solved.owned(slot, rank), (rank,)) for rank in solved.owners(slot)),
        )
        for slot in solved.slots
    ]
    file = one(entries)
    check((file,), entries)
    assert len(file.spans) <= world
    assert sum(move.stop - move.start for move in file.moves) <= PAGE * (world - 1)


def test_a_large_plan_takes_little_time() -> None:
    """10,000 tensors over 512 ranks, as every rank plans them."""
    bucket = [layout.Slot(f"t{k}", (64, 16)) for k in range(1000)]
    solved = solve(bucket, 512)
    ranges = {
        slot.name: tuple(Held(*solved.owned(slot, rank), (rank,)) for rank in solved.owners(slot))
        for slot in solved.slots
    }
    entries = [
        Entry(f"{n}.{name}", "F32", (64, 16), h) for n in range(10) for name, h in ranges.items()
    ]
    file = one(entries)
    assert len(file.spans) <= 10 * 512
    assert file.spans[-1].stop == file.size


@pytest.mark.parametrize(
    ("world", "size"), [(1, 4 << 20), (64, 2 << 20), (256, 512 << 10), (1024, 256 << 10)]
)
def test_blocks_are_a_fraction_of_what_a_rank_holds_of_a_bucket(world: int, size: int) -> None:
    """Here of an embedding as Llama-3-8B has, in fp32: 2 GB."""
    numel = 128_256 * 4096
    cuts = [numel * k // world for k in range(world + 1)]
    ranges = tuple(Held(a, b, (r,)) for r, (a, b) in enumerate(pairwise(cuts)))
    entries = [Entry("embed", "F32", (128_256, 4096), ranges)]
    assert block_size(entries) == size
    (file,) = plan_files("model", entries, 1 << 60, block=size)
    chunks = [*file.chunks(0)]
    assert all(stop - start <= BLOCK and stop % BLOCK == 0 for start, stop in chunks[:-1])
    assert (chunks[0][0], chunks[-1][1]) == (file.spans[0].start, file.spans[0].stop)
    assert plan_files("model", entries, 1 << 60, block=size)[0] is file  # of the same layout
