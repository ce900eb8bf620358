"""A rank's place on each axis of a grid; its shape is tested with the mesh."""

from __future__ import annotations

import pytest

from shardwise.comm.grid import Axis, Grid, Shape


def test_ranks_are_numbered_row_by_row() -> None:
    places = [Grid.of(rank, 6, splits=True, shape=Shape(2, 3)) for rank in range(6)]
    assert [(grid.replicate.rank, grid.shard.rank) for grid in places] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]
    assert {(grid.replicate.size, grid.shard.size, grid.size) for grid in places} == {(2, 3, 6)}


def test_ranks_send_messages_where_neither_memory_is_shared_nor_a_library_sums() -> None:
    for axis in Grid.of(4, 6, splits=True, shape=Shape(2, 3)):
        assert axis.by_messages
        assert not axis._replace(shared=True).by_messages
        assert not axis._replace(vendor=True).by_messages


@pytest.mark.parametrize("shape", [None, Shape(2, 3)])
def test_what_is_not_split_is_replicated_over_all_ranks(shape: Shape | None) -> None:
    grid = Grid.of(4, 6, splits=False, shape=shape)
    assert grid == (Axis(0, 0, 1), Axis(1, 4, 6))
