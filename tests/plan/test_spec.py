"""A bucket on paper: who shares a flat buffer, and where each parameter lies in it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.codec import wire_nbytes
from shardwise.comm.grid import Axis, Grid, Shape
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.config.prefetch import Prefetch
from shardwise.config.strategies import placement_of
from shardwise.plan.layout.layout import cut_at_multiples
from shardwise.plan.schedule.events import UnitBytes
from shardwise.plan.spec import Allocation, BucketSpec, bytes_of, policy_of, specs_of
from shardwise.plan.units.units import choose_units
from tests.nets import NETS, Net, decoder, mostly_frozen

FULL = placement_of("full_shard")
ZERO1 = placement_of("zero1")
DDP = placement_of("no_shard")
PIECES = placement_of("hybrid_full")


ALIGNMENT = 64  # of a CPU


def specs(
    model: nn.Module,
    rank: int = 0,
    world: int = 1,
    placement: Placement = FULL,
    options: Options = Options(),  # noqa: B008 - frozen
) -> list[BucketSpec]:
    grid = Grid.of(rank, world, placement.splits)
    units = choose_units(model)
    return [spec for unit in units for spec in specs_of(unit, options, grid, placement, ALIGNMENT)]


# ---- who shares a buffer -------------------------------------------------------------------------


@pytest.mark.parametrize("bucketing", ["block", "layer", "none"])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_every_parameter_lies_in_one_bucket(net: Net, bucketing: Any) -> None:
    model = net.build()
    names = [
        p for spec in specs(model, 0, 3, options=Options(bucketing=bucketing)) for p in spec.params
    ]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_one_bucket_holds_one_combination_of_dtypes_and_trainability() -> None:
    model = mostly_frozen()
    model.get_submodule("blocks.0.mlp").bfloat16()
    for spec in specs(model):
        assert len({(param.dtype, param.requires_grad) for param in spec.params}) == 1
    assert len([spec for spec in specs(model) if spec.unit == "blocks.0"]) == 3


def test_a_bucket_is_called_by_its_unit_also_where_that_is_the_whole_model() -> None:
    assert {spec.title for spec in specs(nn.Linear(3, 3))} == {"(root)"}
    titles = {spec.title for spec in specs(nn.Sequential(decoder(), decoder()))}
    assert all(titles)
    assert "(root)" not in titles


def test_bucketing_by_layer_and_by_parameter_splits_units_further() -> None:
    counts = {
        way: len(
            [s for s in specs(decoder(), options=Options(bucketing=way)) if "blocks.0" in s.unit]
        )
        for way in ("block", "layer", "none")
    }
    assert counts == {"block": 1, "layer": 8, "none": 13}


def test_trainability_is_that_of_the_moment_of_sharding() -> None:
    model = mostly_frozen()
    of_model = specs(model)
    before = [spec.trainable for spec in of_model]
    model.requires_grad_()
    assert [spec.trainable for spec in of_model] == before


# ---- where each one lies -------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_ranks_parts_joined_are_the_whole_parameters(net: Net, world: int) -> None:
    model = net.build()
    per_rank = [specs(model, rank, world) for rank in range(world)]
    for ranks in zip(*per_rank, strict=True):
        full = torch.arange(float(ranks[0].layout.numel))
        rests = [spec.rest_views(spec.own(full)) for spec in ranks]
        for index, whole in enumerate(ranks[0].full_views(full)):
            parts = [rest[index].flatten() for rest in rests]
            assert torch.equal(torch.cat(parts), whole.flatten())


def test_under_no_shard_each_rank_holds_all_of_it() -> None:
    for spec in specs(decoder(), 1, 3, DDP):
        assert spec.allocation.whole
        full = torch.arange(float(spec.layout.numel))
        for whole, rest in zip(spec.full_views(full), spec.rest_views(full), strict=True):
            assert torch.equal(whole, rest)


def test_one_rank_alone_is_whole_at_rest() -> None:
    for spec in specs(decoder()):
        assert spec.allocation.whole
    assert not any(spec.allocation.whole for spec in specs(decoder(), 0, 2))


def test_slots_start_aligned_for_the_narrowest_dtype_that_lies_there() -> None:
    """64 bytes on a CPU, in bf16 as in fp32."""
    options = Options(precision=sw.Precision(param_dtype=torch.bfloat16))
    for spec in specs(decoder(), 0, 3, options=options):
        for slot in spec.layout.slots:
            assert slot.start * 2 % 64 == 0
        assert spec.layout.shard_numel * 2 % 64 == 0
    starts = [slot.start for spec in specs(decoder(), 0, 3) for slot in spec.layout.slots]
    assert math.gcd(*starts) * 4 == 64  # and not more


@pytest.mark.parametrize("column", [0, 1])
def test_the_copies_of_a_shard_sum_one_piece_of_it_each(column: int) -> None:
    """Of six ranks in three rows, two of which share a row: the ranks below each other."""
    grid = Grid.of(column, 6, splits=True, shape=Shape(3, 2))
    for unit in choose_units(decoder()):
        for spec in specs_of(unit, Options(), grid, FULL, ALIGNMENT):
            assert spec.piece_numel == spec.layout.shard_numel // 3
            for piece in range(3):
                first = piece * spec.piece_numel
                ranks = {spec.summed_by(first), spec.summed_by(first + spec.piece_numel - 1)}
                assert ranks == {2 * piece + column}


def test_the_copies_of_a_shard_may_hold_a_piece_of_it_each() -> None:
    """Three rows of two ranks: column 0 holds the first three of six pieces, from the top down."""
    for row, column in itertools.product(range(3), range(2)):
        grid = Grid.of(2 * row + column, 6, splits=True, shape=Shape(3, 2))
        for unit in choose_units(decoder()):
            for spec in specs_of(unit, Options(), grid, PIECES, ALIGNMENT):
                size, position = spec.layout.shard_numel, 3 * column + row
                assert spec.layout.numel == 6 * size
                assert (spec.position, spec.rank, spec.copies) == (position, 2 * row + column, 1)
                assert (spec.summed_by(0), spec.summed_by(size - 1)) == (spec.rank, spec.rank)
                full = torch.arange(6 * size)
                own = full[position * size : (position + 1) * size]
                assert torch.equal(spec.own(full), own)
                assert torch.equal(spec.sent(full), full[3 * column * size :][: 3 * size])
                assert torch.equal(spec.piece(spec.sent(full)), own)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_shard_of_which_there_is_one_copy_is_in_one_piece(copies: int) -> None:
    grid = Grid.of(0, 2 * copies, splits=True, shape=Shape(copies, 2))
    [spec, *_] = specs_of(choose_units(decoder())[0], Options(), grid, PIECES, ALIGNMENT)
    assert spec.splits_copies is (copies == 2)


def test_gradients_are_divided_before_the_first_axis_and_after_the_last() -> None:
    grid = Grid.of(0, 6, splits=True, shape=Shape(3, 2))
    [spec, *_] = specs_of(choose_units(decoder())[0], Options(), grid, FULL, ALIGNMENT)
    spec = replace(spec, reduction=replace(spec.reduction, before=2.0, after=3.0))
    (rows, first), (columns, last) = spec.averages
    assert (rows, columns) == (grid.shard, grid.replicate)
    assert [(r.before, r.after) for r in (first, last)] == [(2.0, 1.0), (1.0, 3.0)]
    one_axis = replace(spec, replicate=Axis(1, 0, 1))
    assert one_axis.averages == [(grid.shard, spec.reduction)]


BF16 = Options(precision=sw.Precision(param_dtype=torch.bfloat16))
IN_HOST = Options(offload="optimizer")
NOT_KEPT = Options(offload="everything")
ALLOCATIONS = {  # lasting, aliased, whole, stays whole, reloaded
    "shards that are freed": (FULL, 2, Options(), (False, False, False, False, False)),
    "that are cast": (FULL, 2, BF16, (False, False, False, False, False)),
    "that keep the memory": (ZERO1, 2, Options(), (True, True, False, False, False)),
    "that keep it, and are cast": (ZERO1, 2, BF16, (True, False, False, False, False)),
    "copies": (DDP, 2, Options(), (True, True, True, True, False)),
    "copies that are cast": (DDP, 2, BF16, (True, False, True, False, False)),
    "one rank alone": (FULL, 1, Options(), (True, True, True, True, False)),
    "one that casts": (FULL, 1, BF16, (False, False, True, False, False)),
    "in host memory, sent from the device": (FULL, 2, IN_HOST, (False, False, False, False, False)),
    "of which the device keeps nothing": (ZERO1, 2, NOT_KEPT, (False, False, False, False, True)),
    "one rank alone beside its host": (FULL, 1, IN_HOST, (True, False, True, False, False)),
    "and one that keeps nothing": (FULL, 1, NOT_KEPT, (False, False, True, False, True)),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_where_the_memory_of_a_bucket_lies(name: str) -> None:
    placement, world, options, expected = ALLOCATIONS[name]
    for spec in specs(decoder(), 0, world, placement, options):
        assert spec.allocation == Allocation(False, *expected)


@pytest.mark.parametrize(
    ("placement", "options", "expected"),
    [
        (FULL, Options(), (True, True, False, False, False)),
        (FULL, BF16, (True, False, False, False, False)),
        (FULL, NOT_KEPT, (True, False, False, False, False)),
        (DDP, Options(), (True, True, True, True, False)),
    ],
)
def test_a_bucket_that_ranks_map_lasts(
    placement: Placement, options: Options, expected: tuple[bool, ...]
) -> None:
    shard, replicate = Grid.of(0, 2, placement.splits)
    grid = Grid(shard._replace(shared=True), replicate)
    for unit in choose_units(decoder()):
        for spec in specs_of(unit, options, grid, placement, ALIGNMENT):
            assert spec.allocation == Allocation(True, *expected)
            assert spec.gather_sent == 0


def test_a_frozen_bucket_that_is_kept_is_never_loaded_again() -> None:
    [spec, *_] = specs(mostly_frozen(), 0, 2, FULL, NOT_KEPT)
    assert not spec.trainable
    assert spec.allocation.reloaded
    allocation = replace(spec, kept=True).allocation
    assert allocation == Allocation(
        False, lasting=True, aliased=False, whole=False, stays_whole=False, reloaded=False
    )


def test_what_is_frozen_is_kept_where_full_buckets_stay_and_off_the_host_but_for_parameters() -> (
    None
):
    def of(placement: Placement, options: Options) -> set[tuple[bool, bool, bool]]:
        buckets = specs(mostly_frozen(), 0, 2, placement, options)
        return {(spec.trainable, spec.kept, spec.in_host) for spec in buckets}

    assert of(FULL, Options()) == {(False, False, False), (True, False, False)}
    assert of(ZERO1, Options()) == {(False, True, False), (True, False, False)}
    assert of(ZERO1, IN_HOST) == {(False, True, False), (True, False, True)}
    assert of(ZERO1, NOT_KEPT) == {(False, False, True), (True, False, True)}


STAGED: dict[str, tuple[Placement, Options, torch.dtype | None]] = {
    "nothing": (FULL, Options(), None),
    "nothing where it lasts in the full bucket": (ZERO1, IN_HOST, None),
    "nothing where it is loaded into the full bucket": (FULL, NOT_KEPT, None),
    "what was loaded": (FULL, replace(BF16, offload="optimizer"), torch.bfloat16),
    "the pieces of copies": (PIECES, Options(), torch.float32),
}


@pytest.mark.parametrize("name", STAGED)
def test_what_is_sent_is_kept_beside_the_full_bucket(name: str) -> None:
    placement, options, dtype = STAGED[name]
    copies = 2 if placement.hybrid else 1
    grid = Grid.of(0, 2 * copies, splits=True, shape=Shape(copies, 2))
    for spec in specs_of(choose_units(decoder())[0], options, grid, placement, ALIGNMENT):
        assert spec.staged is dtype


def test_an_optimizers_blocks_are_atoms_of_what_it_steps() -> None:
    buckets = specs(mostly_frozen(), 0, 2, options=Options(blocksize=8))
    atoms = {spec.trainable: {slot.atom for slot in spec.layout.slots} for spec in buckets}
    assert atoms == {False: {1, 16}, True: {8}}  # of what is frozen, rows


# ---- what it weighs, sends and does --------------------------------------------------------------


@pytest.mark.parametrize("placement", [FULL, PIECES], ids=["copies", "pieces"])
def test_bytes_of_a_grid_of_three_rows_of_two_ranks(placement: Placement) -> None:
    """The shards of a row are sent to one other rank, what rows have to two."""
    grid, joins = Grid.of(5, 6, splits=True, shape=Shape(3, 2)), placement is PIECES
    options = replace(BF16, offload="everything")
    for unit in choose_units(mostly_frozen()):
        buckets = specs_of(unit, options, grid, placement, ALIGNMENT)
        trained = [spec for spec in buckets if spec.trainable]
        every = sum(spec.layout.numel for spec in buckets)
        trained_numel = sum(spec.layout.numel for spec in trained)
        rest = {
            spec: spec.layout.numel // (6 if joins and spec.trainable else 2) for spec in buckets
        }
        assert all(spec.splits_copies is (joins and spec.trainable) for spec in buckets)
        assert bytes_of(buckets, trained) == UnitBytes(
            gathered=2 * every,
            gradients=2 * trained_numel,
            spread=0 if joins else 4 * trained_numel,
            joined=2 * trained_numel if joins else 0,
            gather_sent=2 * every // 2,
            update_sent=2 * trained_numel // 2 * 2 // 3 if joins else 0,
            reduce_sent=2 * trained_numel // 2,
            average_sent=sum(
                (2 if joins else 6) * spec.layout.numel // 2 * 2 // 3 for spec in trained
            ),
            loaded=4 * sum(rest.values()),
            stored=4 * sum(rest[spec] for spec in trained),
            kept_sent=0,
        )


NARROW_STORED = sw.Precision(torch.bfloat16, reduce_dtype=torch.float32)
EXCHANGES: dict[str, tuple[int, Placement, sw.Precision, bool]] = {
    "two copies": (2, DDP, sw.Precision(), True),
    "in less": (2, DDP, sw.Precision(reduce_dtype=torch.int8), True),
    "not in more than the mean takes": (2, DDP, NARROW_STORED, False),
    "not three": (3, DDP, sw.Precision(), False),
    "not pieces": (2, ZERO1, sw.Precision(), False),
    "nor one": (1, DDP, sw.Precision(), False),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_two_copies_send_each_other_all_their_gradients(name: str) -> None:
    """As many bytes as if each summed a half, in one collective: nothing is spread."""
    world, placement, precision, expected = EXCHANGES[name]
    for spec in specs(decoder(), 0, world, placement, Options(precision=precision)):
        assert (spec.exchanges, spec.averages[-1][1].whole) == (expected, expected)
        assert spec.spreads is (placement is DDP and world > 1 and not expected)
        nbytes = bytes_of([spec], [spec])
        assert bool(nbytes.spread) is spec.spreads
        if expected:
            assert nbytes.reduce_sent == wire_nbytes(spec.dtypes.reduce, spec.layout.numel, 2)


LARGE = nn.Linear(1024, 1024, device="meta")  # 4 MiB, and a bias


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(sw.Precision(), True), (sw.Precision(reduce_dtype=torch.bfloat16), False)],
)
@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_of_copies_is_formed_in_a_large_gradient_bucket(
    world: int, precision: sw.Precision, expected: bool
) -> None:
    """Where all dtypes are one; then nothing is sent whole, and nothing is copied to be spread."""
    [spec] = specs(LARGE, 0, world, DDP, Options(precision=precision))
    assert spec.in_place is spec.averages[-1][1].in_place is expected
    assert spec.exchanges is (world == 2 and not expected)


@pytest.mark.parametrize("how", ["vendor", "shared"])
def test_copies_send_halves_where_they_send_no_messages(how: str) -> None:
    shard, replicate = Grid.of(0, 2, splits=False)
    grid = Grid(shard, replicate._replace(**{how: True}))
    for unit in choose_units(decoder()):
        for spec in specs_of(unit, Options(), grid, DDP, ALIGNMENT):
            assert spec.spreads
            assert not spec.exchanges
            assert spec.reduce_sent == 4 * spec.layout.numel  # a half, and a half of the mean


def test_what_is_kept_is_sent_once() -> None:
    [frozen, trained] = [
        spec for spec in specs(mostly_frozen(), 0, 2, ZERO1) if spec.unit == "blocks.0"
    ]
    nbytes = bytes_of([frozen, trained], [trained])
    assert nbytes.kept_sent == frozen.gather_sent == 4 * frozen.layout.numel // 2
    assert bytes_of([frozen, trained], [frozen, trained]).kept_sent == 0  # it is trained now


def test_the_policy_says_what_some_bucket_of_a_unit_needs() -> None:
    def of(placement: Placement, options: Options) -> list[bool]:
        copies = 2 if placement.hybrid else 1
        grid = Grid.of(0, 2 * copies, splits=True, shape=Shape(copies, 2))
        buckets = specs_of(choose_units(decoder())[0], options, grid, placement, ALIGNMENT)
        policy = policy_of(buckets, Prefetch())
        assert policy.placements == {buckets[0].unit: placement}
        every = (policy.joins, policy.loads, policy.reloads)
        assert all(units <= policy.placements.keys() for units in every)
        return [policy.casts, *map(bool, every)]

    assert of(FULL, Options()) == [False, False, False, False]
    assert of(FULL, BF16) == [True, False, False, False]
    assert of(PIECES, Options()) == [False, True, False, False]
    assert of(FULL, IN_HOST) == [False, False, True, False]
    assert of(FULL, NOT_KEPT) == [False, False, True, True]


def test_a_range_is_cut_at_multiples() -> None:
    assert list(cut_at_multiples(3, 9, 4)) == [(3, 4), (4, 8), (8, 9)]
    assert list(cut_at_multiples(4, 4, 4)) == []
