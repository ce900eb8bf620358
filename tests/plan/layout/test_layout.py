"""Who owns what: small buckets, drawn."""

from __future__ import annotations

from math import prod

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.plan.layout.layout import Slot, chunk_rows
from shardwise.plan.layout.solver import solve
from tests.plan.layout.slots import Shape, specs

# --- small buckets, drawn ---------------------------------------------------------------------


def test_a_square_on_two_ranks_is_cut_into_two_halves_of_its_rows() -> None:
    layout = solve([Slot("weight", (64, 64))], world=2)
    assert layout.padding == 0
    assert [layout.shard_shape(layout.by_name["weight"], rank) for rank in (0, 1)] == [(32, 64)] * 2


def test_a_linear_of_three_by_three_on_two_ranks_is_cut_between_rows() -> None:
    layout = solve([Slot("weight", (3, 3)), Slot("bias", (3,))], world=2, align=1)
    assert str(layout) == (
        "2 shards of 6, padding 0 (0.00%)\n"
        "   slot    shape   place  atom  ranks  rows on each\n"
        "a  weight  (3, 3)  0–9    3     0–1    2, 1\n"
        "b  bias    (3,)    9–12   1     1–1    3\n"
        "rank 0            | rank 1\n"
        "a0 a1 a2 a3 a4 a5 | a6 a7 a8 b0 b1 b2"
    )


def test_slots_start_aligned_and_the_rest_of_a_step_is_padding() -> None:
    layout = solve([Slot("weight", (3, 3)), Slot("bias", (3,))], world=2)
    assert [(slot.start, slot.stop) for slot in layout.slots] == [(0, 9), (16, 19)]
    assert str(layout).endswith("| b0 b1 b2 ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·")


def test_rows_are_given_up_where_keeping_them_would_pad_too_much() -> None:
    layout = solve(specs((2, 5), (4, 1)), world=7, align=1, slack=0)
    assert [slot.atom for slot in layout.slots] == [1, 1]
    assert [layout.shard_shape(layout.slots[0], rank) for rank in (0, 4, 5)] == [(2, 1)] * 2 + [
        (0, 1)
    ]
    assert "2, 2, 2, 2, 2 elements" in str(layout)


def test_a_big_bucket_is_a_table_without_a_drawing() -> None:
    assert str(solve(specs((90, 64), (3, 17)), world=9)) == (
        "9 shards of 656, padding 93 (1.60%)\n"
        "   slot  shape     place      atom  ranks  rows on each\n"
        "a  p0    (90, 64)  0–5760     1     0–8    "
        "656, 656, 656, 656, 656, 656, 656, 656, … elements\n"
        "b  p1    (3, 17)   5760–5811  17    8–8    3"
    )


@pytest.mark.parametrize(
    ("slots", "numel", "drawn"),
    [(1, 1, True), (1, 48, True), (1, 49, False), (26, 1, True), (27, 1, False)],
)
def test_up_to_48_elements_in_26_slots_are_drawn(slots: int, numel: int, drawn: bool) -> None:
    layout = solve(specs(*[(numel,)] * slots), world=1, align=1)
    assert ("rank 0" in str(layout)) is drawn


def test_the_parts_of_eight_ranks_are_listed() -> None:
    assert str(solve(specs((16, 64)), world=8)).endswith("0–7    2, 2, 2, 2, 2, 2, 2, 2")


# --- shapes of shards -------------------------------------------------------------------------


def test_a_scalar_lives_on_one_rank_and_the_others_hold_nothing() -> None:
    layout = solve([Slot("scale", ())], world=3)
    shapes = [layout.shard_shape(layout.slots[0], rank) for rank in range(3)]
    assert shapes == [(), (0,), (0,)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.5).step()
    assert [parameter.numel() for parameter in parameters] == [1, 0, 0]


def test_element_atoms_keep_the_number_of_dimensions() -> None:
    layout = solve([Slot("conv", (4, 3, 7, 7))], world=64, align=1, slack=0)
    assert layout.shard_shape(layout.slots[0], 0) == (10, 1, 1, 1)


def test_a_rank_in_the_middle_of_a_slot_whose_rows_are_cut_has_a_part_of_it() -> None:
    layout = solve(specs((2, 6)), world=3, align=1, slack=0)
    assert [layout.shard_shape(layout.slots[0], rank) for rank in range(3)] == [(4, 1)] * 3


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 5)])
def test_a_parameter_without_elements_keeps_its_shape_everywhere(shape: Shape) -> None:
    for layout in (solve(specs(shape, (5,)), world=2), chunk_rows(Slot("p0", shape), world=2)):
        slot = layout.by_name["p0"]
        assert [layout.shard_shape(slot, rank) for rank in range(2)] == [shape] * 2
        assert list(layout.owners(slot)) == []


@pytest.mark.parametrize("shapes", [[(3, 5), (7,), (), (2, 2, 9)], [(1,)] * 40, [(1000, 3)]])
def test_one_rank_pads_for_alignment_only_and_keeps_model_order(shapes: list[Shape]) -> None:
    layout = solve(specs(*shapes), world=1)
    assert layout.numel == sum(-(-prod(shape) // 16) * 16 for shape in shapes)
    assert str(layout).startswith(f"1 shard of {layout.numel}, padding ")
    assert [slot.name for slot in layout.slots] == [f"p{index}" for index in range(len(shapes))]
    assert [layout.shard_shape(slot, 0) for slot in layout.slots] == shapes


# --- given atoms ------------------------------------------------------------------------------


def test_a_given_atom_is_never_given_up_however_much_padding_it_costs() -> None:
    layout = solve([Slot("codes", (2, 4096), atom=4096), Slot("scale", (64,))], world=16)
    assert layout.shard_numel == 4096
    assert len(layout.owners(layout.by_name["codes"])) == 2


def test_a_given_atom_of_whole_rows_keeps_rows() -> None:
    layout = solve([Slot("codes", (12, 16), atom=32)], world=4)
    slot = layout.by_name["codes"]
    assert [layout.shard_shape(slot, rank) for rank in range(4)] == [(4, 16)] * 3 + [(0, 16)]


def test_beside_a_given_atom_the_slot_with_most_elements_still_keeps_its_rows() -> None:
    layout = solve([Slot("codes", (64, 80), atom=80), Slot("weight", (165, 512))], world=3)
    assert all(slot.keeps_rows for slot in layout.slots)


# --- one bucket per parameter -----------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 7))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9, 16])
def test_chunks_are_those_of_torch_chunk(rows: int, world: int) -> None:
    layout = chunk_rows(Slot("weight", (rows, 3)), world)
    slot = layout.slots[0]
    chunks = [tuple(chunk.shape) for chunk in torch.empty(rows, 3).chunk(world)]
    assert [layout.shard_shape(slot, rank) for rank in range(world)] == chunks + [(0, 3)] * (
        world - len(chunks)
    )
    assert layout.shard_numel == -(-rows // world) * 3


def test_uneven_rows_are_padded_and_the_drawing_says_so() -> None:
    assert str(chunk_rows(Slot("weight", (3, 3)), world=2)) == (
        "2 shards of 6, padding 3 (33.33%): padded 3→4 rows on dim 0\n"
        "   slot    shape   place  atom  ranks  rows on each\n"
        "a  weight  (3, 3)  0–9    3     0–1    2, 1\n"
        "rank 0            | rank 1\n"
        "a0 a1 a2 a3 a4 a5 | a6 a7 a8 ·  ·  ·"
    )


def test_even_rows_are_not_said_to_be_padded() -> None:
    assert "padded" not in str(chunk_rows(Slot("weight", (4, 3)), world=2, uneven="error"))


def test_uneven_rows_can_be_refused() -> None:
    with pytest.raises(ConfigError) as error:
        chunk_rows(Slot("weight", (7, 3)), world=2, uneven="error")
    assert str(error.value) == (
        "Current sharding requires the first dimension of the parameter 'weight' (7) "
        "to be divisible by the world size (2)"
    )


def test_chunks_do_not_cut_given_atoms() -> None:
    layout = chunk_rows(Slot("codes", (6, 10), atom=20), world=4)
    assert [layout.owned(layout.slots[0], rank)[0] for rank in range(4)] == [0, 20, 40, 60]
