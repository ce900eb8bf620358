"""All buckets, checked element by element and against brute force; real ones, weighed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, permutations
from math import prod
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.layout.layout import Layout, Slot, chunk_rows
from shardwise.plan.layout.solver import solve
from tests.plan.layout.slots import WORLDS, Shape, specs


def rows_given_up(layout: Layout) -> float:
    """The share of elements that lie in slots with element atoms."""
    return sum(slot.numel for slot in layout.slots if not slot.keeps_rows) / layout.used


# --- every layout, element by element -----------------------------------------------------------


def check(layout: Layout, slots: Iterable[Slot]) -> None:
    """Everything that the engine relies on, from the definitions alone."""
    by_name = {spec.name: spec for spec in slots}
    shapes = {name: spec.shape for name, spec in by_name.items()}
    assert {slot.name: slot.shape for slot in layout.slots} == shapes
    assert all(one.stop <= two.start for one, two in pairwise(layout.slots))
    assert all(slot.start >= 0 and slot.stop <= layout.numel for slot in layout.slots)
    assert layout.numel == layout.used + layout.padding
    bucket: list[tuple[str, int] | None] = [None] * layout.numel
    for slot in layout.slots:
        bucket[slot.start : slot.stop] = [(slot.name, element) for element in range(slot.numel)]
        assert layout.by_name[slot.name] is slot
        wanted = by_name[slot.name].atom
        assert slot.atom == wanted if wanted else slot.atom in {1, slot.row}
    for rank in range(layout.world):
        shard = bucket[rank * layout.shard_numel :][: layout.shard_numel]
        for slot in layout.slots:
            check_part(layout, slot, rank, shard)


def check_part(
    layout: Layout, slot: Slot, rank: int, shard: Sequence[tuple[str, int] | None]
) -> None:
    (lo, hi), (start, stop) = layout.owned(slot, rank), layout.local_range(slot, rank)
    assert 0 <= start <= stop <= layout.shard_numel
    assert list(shard[start:stop]) == [(slot.name, element) for element in range(lo, hi)]
    assert sum(place is not None and place[0] == slot.name for place in shard) == hi - lo
    assert (rank in layout.owners(slot)) == (lo < hi)
    assert lo % slot.atom == 0 or lo == slot.numel
    shape = layout.shard_shape(slot, rank)
    assert prod(shape) == hi - lo
    assert len(shape) == max(len(slot.shape), lo == hi) or slot.numel == 0
    assert shape[1:] == slot.shape[1:] or not slot.keeps_rows


def most(slots: Sequence[Slot], world: int, align: int, slack: int) -> int:
    """The elements that the bucket may have, if no atom was given."""
    sizes = [prod(spec.shape) for spec in slots]
    aligned = sum(-(-size // align) * align for size in sizes)
    least = -(-aligned // (world * align)) * world * align
    bounds = [total + max(total // 50, slack * world) for total in (sum(sizes), aligned)]
    return next((bound for bound in bounds if bound >= least), least)


SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(0, 12), st.integers(0, 20)),
    st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
)
BUCKETS = st.lists(SHAPES, max_size=14)
WORLD = st.one_of(st.integers(1, 9), st.just(64))


@settings(max_examples=200)
@given(BUCKETS, WORLD, st.sampled_from([1, 4, 16]), st.sampled_from([0, 2, 32]))
def test_any_bucket_is_laid_out_whole_aligned_and_within_its_bound(
    shapes: list[Shape], world: int, align: int, slack: int
) -> None:
    slots = specs(*shapes)
    layout = solve(slots, world, align, slack)
    check(layout, slots)
    assert layout.shard_numel % align == 0
    assert all(slot.start % align == 0 for slot in layout.slots)
    assert layout.numel <= most(slots, world, align, slack)
    assert layout == solve(slots, world, align, slack)
    assert layout.over(world) == layout
    for larger in {1, world // 2} if world % 2 == 0 else {1}:
        check(layout.over(larger), slots)
        assert [slot.start for slot in layout.over(larger).slots] == [s.start for s in layout.slots]
    assert all(slot.keeps_rows for slot in layout.over(1).slots)


@given(BUCKETS, WORLD, st.lists(st.sampled_from([0, 3, 4, 10]), min_size=14, max_size=14))
def test_any_bucket_with_given_atoms_keeps_them(
    shapes: list[Shape], world: int, atoms: list[int]
) -> None:
    slots = [
        Slot(spec.name, spec.shape, atom) for spec, atom in zip(specs(*shapes), atoms, strict=False)
    ]
    check(solve(slots, world, align=4), slots)


@given(SHAPES, WORLD, st.sampled_from([0, 3, 8]))
def test_any_parameter_is_chunked_whole(shape: Shape, world: int, atom: int) -> None:
    spec = Slot("p0", shape, atom)
    layout = chunk_rows(spec, world)
    check(layout, [spec])
    assert layout.shard_numel % layout.slots[0].row == 0


# --- against brute force ------------------------------------------------------------------------


def first_start(at: int, size: int, row: int, shard: int) -> int | None:
    """The first start from ``at`` on with every boundary between rows, tried one by one."""
    for start in range(at, at + 2 * shard + 1):
        boundaries = range(start // shard * shard + shard, start + size, shard)
        if all((boundary - start) % row == 0 for boundary in boundaries):
            return start
    return None


def fits(shapes: Sequence[tuple[int, int]], given_up: set[int], world: int, shard: int) -> bool:
    """Whether some order of these (rows, row) matrices, padded at will, ends in the bucket."""
    for order in permutations(range(len(shapes))):
        at: int | None = 0
        for index in order:
            rows, row = shapes[index]
            if at is not None:
                at = first_start(at, rows * row, 1 if index in given_up else row, shard)
                at = None if at is None else at + rows * row
        if at is not None and at <= shard * world:
            return True
    return False


def best(shapes: Sequence[tuple[int, int]], world: int, largest: int) -> tuple[int, int]:
    """The fewest elements that must give up rows, and then the smallest shard size."""
    everything = range(len(shapes))
    choices = [set(some) for k in range(len(shapes) + 1) for some in combinations(everything, k)]
    choices = [some for some in choices if all(shapes[index][1] > 1 for index in some)]
    for given_up in sorted(choices, key=lambda some: sum(prod(shapes[i]) for i in some)):
        for shard in range(-(-sum(map(prod, shapes)) // world), largest + 1):
            if fits(shapes, given_up, world, shard):
                return sum(prod(shapes[i]) for i in given_up), shard
    raise AssertionError("giving up all rows always works")


def tiny(random: Random) -> tuple[list[tuple[int, int]], int]:
    count = random.randint(1, 5)
    rows = [1, 1, 2, 3, 4, 5, 7]
    return [(random.randint(1, 6), random.choice(rows)) for _ in range(count)], random.randint(2, 5)


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_tiny_buckets_get_the_best_of_all_orders_and_paddings(slack: int) -> None:
    random = Random(slack)
    for _ in range(200):
        shapes, world = tiny(random)
        layout = solve(specs(*shapes), world, align=1, slack=slack)
        lost = sum(slot.numel for slot in layout.slots if not slot.keeps_rows)
        largest = most(specs(*shapes), world, 1, slack) // world
        assert (lost, layout.shard_numel) == best(shapes, world, largest), (shapes, world)


# --- real models --------------------------------------------------------------------------------


def llama_block(hidden: int, inner: int) -> list[Shape]:
    square, up = (hidden, hidden), (inner, hidden)
    return [square] * 4 + [up, up, (hidden, inner), (hidden,), (hidden,)]


def gpt2_block(h: int) -> list[Shape]:
    attention = [(h, 3 * h), (3 * h,), (h, h), (h,)]
    return [(h,), (h,), *attention, (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]


def resnet50() -> list[Shape]:
    shapes, width_in = [(64, 3, 7, 7), (64,), (64,)], 64
    for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for index in range(count):
            wide = 4 * width
            convs = [(width, width_in, 1, 1), (width, width, 3, 3), (wide, width, 1, 1)]
            convs += [(wide, width_in, 1, 1)] if index == 0 else []
            shapes += [shape for conv in convs for shape in (conv, conv[:1], conv[:1])]
            width_in = wide
    return [*shapes, (1000, 2048), (1000,)]


def lora(hidden: int, inner: int, rank: int = 16) -> list[Shape]:
    linears = [shape for shape in llama_block(hidden, inner) if len(shape) == 2]
    return [shape for out, into in linears for shape in ((rank, into), (out, rank))]


UNITS: dict[str, list[Shape]] = {
    "Llama-7B block": llama_block(4096, 11008),
    "Llama-7B embedding": [(32000, 4096)],
    "Llama-7B norm, head": [(4096,), (32000, 4096)],
    "GPT-2 embeddings": [(50257, 768), (1024, 768)],
    "GPT-2 block": gpt2_block(768),
    "ResNet-50, whole": resnet50(),
    "LoRA r=16, block": lora(4096, 11008),
    "8 stacked experts": [(8, 14336, 4096), (8, 14336, 4096), (8, 4096, 14336)],
}


def table(cell: dict[str, list[str]]) -> str:
    return "\n".join(
        f"{name:20}" + "".join(f"{c:>14}" for c in cells) for name, cells in cell.items()
    )


def test_shapes_are_those_of_the_models() -> None:
    sizes = {name: sum(map(prod, shapes)) for name, shapes in UNITS.items()}
    assert sizes["Llama-7B block"] == 202_383_360
    assert sizes["ResNet-50, whole"] == 25_557_032
    assert sizes["GPT-2 embeddings"] + 12 * sizes["GPT-2 block"] + 2 * 768 == 124_439_808
    assert sizes["LoRA r=16, block"] == 1_249_280


def test_real_units_are_padded_by_two_per_cent_at_most() -> None:
    """Padding, and the share of elements that give up rows, of each unit at each world."""
    cells: dict[str, list[str]] = {"": [f"W={world}" for world in WORLDS]}
    for name, shapes in UNITS.items():
        layouts = [solve(specs(*shapes), world) for world in WORLDS]
        assert all(50 * layout.padding <= layout.used for layout in layouts)
        cells[name] = [f"{x.padding / x.used:.2%} {rows_given_up(x):4.0%}" for x in layouts]
    assert table(cells) == PADDING


PADDING = """\
                               W=3           W=5           W=7           W=8          W=64
Llama-7B block          0.00%   0%    0.08%   0%    0.01%   0%    0.01%   0%    0.26%   0%
Llama-7B embedding      0.00%   0%    0.00%   0%    0.01%   0%    0.00%   0%    0.00%   0%
Llama-7B norm, head     0.00%   0%    0.01%   0%    0.01%   0%    0.02%   0%    0.20%   0%
GPT-2 embeddings        0.00%   0%    0.01%   0%    0.00%   0%    0.01%   0%    0.09%   0%
GPT-2 block             0.02%   0%    0.01%   0%    0.12%   0%    0.21%   0%    1.94%  33%
ResNet-50, whole        0.01%   0%    0.07%   0%    0.00%   0%    0.10%   0%    1.55%   0%
LoRA r=16, block        0.33%   0%    0.00%   0%    0.98%   0%    0.61%   0%    0.00%  46%
8 stacked experts       0.00%   0%    0.00% 100%    0.00% 100%    0.00%   0%    0.00% 100%"""


# --- speed --------------------------------------------------------------------------------------


def many(kind: str) -> list[Shape]:
    """10,000 shapes, easy and hard: blocks that repeat, adapters, scalars, no two alike."""
    random = Random(0)
    repeated: dict[str, list[Shape]] = {
        "blocks": llama_block(512, 1376),
        "adapters": lora(512, 1376),
        "scalars": [()],
        "convolutions": resnet50(),
    }
    if kind in repeated:
        return (repeated[kind] * 10_000)[:10_000]
    return [(random.randint(1, 64), random.randint(1, 5000)) for _ in range(10_000)]


@pytest.mark.parametrize("kind", ["blocks", "adapters", "scalars", "convolutions", "no two alike"])
def test_ten_thousand_parameters_on_1024_ranks_take_less_than_two_seconds(kind: str) -> None:
    slots = specs(*many(kind))
    begin = process_time()
    layout = solve(slots, world=1024)
    assert process_time() - begin < 2
    assert layout.numel <= most(slots, 1024, align=16, slack=32)
    assert rows_given_up(layout) < 0.3


def test_a_bucket_without_any_good_layout_takes_less_than_two_seconds() -> None:
    random = Random(0)
    shapes = [(random.randint(1, 8), 16 * random.randint(1, 5000)) for _ in range(1000)]
    begin = process_time()
    layout = solve(specs(*shapes), world=1024)  # about one parameter per rank, no two alike
    assert process_time() - begin < 2
    assert 50 * layout.padding <= layout.used
