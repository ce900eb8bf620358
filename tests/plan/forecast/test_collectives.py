"""Time of a collective: the slowest link on a ring bounds it, and each further rank adds to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.comm.grid import Grid, Shape
from shardwise.plan.forecast.collectives import Network, Ring
from shardwise.plan.forecast.machine import Link, Machine, known
from shardwise.plan.schedule.events import Op, UnitBytes

FAST, SLOW = Link("fast", 100e9, 1e-6, ""), Link("slow", 40e9, 1e-5, "")
MACHINE = Machine(known().accelerator("A100"), FAST, SLOW, Link("host", 20e9, 0.0, ""), per_host=8)
GB = 10**9


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, 100e9),  # inside one host
        (16, 1, 40e9),  # all cards of a host carry the one ring
        (4, 8, 5e9),  # eight rings share them
        (4, 2, 100e9),
        (8, 2, 20e9),
    ],
)
def test_the_bandwidth_of_a_ring_is_that_of_its_slowest_link(
    size: int, stride: int, bandwidth: float
) -> None:
    assert Ring(MACHINE, size, stride).bandwidth == bandwidth


def test_a_ring_between_hosts_takes_less_of_the_device_than_one_inside() -> None:
    much = 10**6 * GB  # so that hops take no time
    assert Ring(MACHINE, 8).strain(much) == pytest.approx(1)
    assert Ring(MACHINE, 16).strain(much) == pytest.approx(0.5 + 0.5 * 0.4)
    network = Network.of(MACHINE, Grid.of(0, 32, splits=True, shape=Shape(4, 8)))
    unit = UnitBytes(0, 0, reduce_sent=much, gather_sent=much, average_sent=much)
    strains = [network.strain(op, unit) for op in (Op.GATHER, Op.REDUCE, Op.AVERAGE, Op.LOAD)]
    assert strains == pytest.approx([1, 1, 0.5 + 0.5 * 0.05, 1])


def test_a_faster_link_takes_no_more_from_computing() -> None:
    links = [replace(SLOW, bandwidth=rate) for rate in (1e9, 1e10, 4e10, 1e11)]
    for sent in (1e3, 1e6, 1e9):
        rings = [Ring(replace(MACHINE, between=link), 16) for link in links]
        taken = [ring.seconds(sent) * ring.strain(sent) for ring in rings]
        assert taken == sorted(taken, reverse=True)


def test_bytes_take_time_and_so_do_ranks_and_hosts() -> None:
    assert Ring(MACHINE, 1).seconds(GB) == 0
    assert Ring(MACHINE, 8).seconds(0) == 0
    assert Ring(MACHINE, 8).seconds(GB) == pytest.approx(0.01 + 7e-6)
    assert Ring(MACHINE, 32).seconds(GB) == pytest.approx(0.025 + 28e-6 + 3e-5, rel=1e-9)
    assert Ring(MACHINE, 8).seconds(GB, rounds=2) == pytest.approx(0.01 + 14e-6)


def test_gradients_of_a_hybrid_travel_over_both_axes() -> None:
    network = Network.of(MACHINE, Grid.of(0, 32, splits=True, shape=Shape(4, 8)))
    sent = {"reduce_sent": 7 * GB // 8, "average_sent": 3 * GB // 32}
    unit = UnitBytes(0, gradients=GB, spread=0, **sent, loaded=GB, stored=GB // 2)
    over_hosts = 3 * GB / 32 / 5e9 + 3e-5
    assert network.seconds(Op.REDUCE, unit) == pytest.approx(7 / 800 + 7e-6, rel=1e-2)
    assert network.seconds(Op.AVERAGE, unit) == pytest.approx(over_hosts, rel=1e-2)
    assert network.seconds(Op.LOAD, unit) == 2 * network.seconds(Op.STORE, unit) == 0.05
