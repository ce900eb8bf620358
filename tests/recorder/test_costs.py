"""Counts of the recorder: bytes as an allocator rounds them, and units beside a collective."""

from __future__ import annotations

import pytest

from tests.recorder.allocator import MIB, Allocator
from tests.recorder.clocks import Stream
from tests.recorder.overlap import Overlap


@pytest.mark.parametrize(
    ("nbytes", "used", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left over is too little for another one
    ],
)
def test_a_block_is_rounded_and_lies_in_a_segment(nbytes: int, used: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(nbytes, "compute")
    assert (allocator.used, allocator.reserved) == (used, reserved)


def test_a_free_block_serves_its_own_stream_alone_and_joins_its_neighbours() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(MIB, "compute") for _ in range(2)]
    allocator.allocate(MIB, "load")
    assert allocator.reserved == 4 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.allocate(MIB // 2, "compute")
    allocator.allocate(MIB, "compute")
    assert allocator.used == 2.5 * MIB
    assert (allocator.peak, allocator.reserved) == (3 * MIB, 4 * MIB)


def test_pinned_memory_is_a_power_of_two() -> None:
    allocator = Allocator()
    allocator.pin(5 * MIB)
    allocator.pin(-5 * MIB)
    assert (allocator.pinned, allocator.pinned_peak) == (0, 8 * MIB)


def test_units_are_counted_that_may_be_computed_beside_a_collective() -> None:
    host = Stream("host", waits=False)
    compute, group = (Stream(name, waits=False, host=host) for name in ("compute", "group"))
    overlap = Overlap(compute)

    def issue() -> None:
        overlap.issue("all_gather", "shard", 4, group.stamp("all_gather"), group.clock)

    issue()
    overlap.computes()
    group.wait_stream(compute)
    issue()
    overlap.computes()
    compute.wait_stream(group)
    overlap.computes()
    assert [flight.units for flight in overlap.flights] == [2, 1]
    overlap.begin()
    overlap.computes()
    issue()
    assert [flight.units for flight in overlap.flights] == [1]
