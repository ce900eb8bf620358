from __future__ import annotations

import sys

import pytest

from shardwise.comm.machine.accelerators import row
from shardwise.comm.machine.interfaces import (
    Interface,
    interface_to,
    interface_variables,
    interfaces,
    reachable,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are read on Linux")
LOOPBACK = Interface("lo", "127.0.0.1")


def test_what_others_reach_private_networks_first() -> None:
    addresses = [
        LOOPBACK,
        Interface("docker0", "172.17.0.1"),
        Interface("eth0", "8.8.4.4"),
        Interface("eth1", "fd00::3"),
        Interface("eth1", "10.0.0.3"),
    ]
    assert [one.address for one in reachable(addresses)] == ["10.0.0.3", "fd00::3", "8.8.4.4"]


def test_the_interface_that_leads_to_an_address() -> None:
    assert LOOPBACK in interfaces()
    assert interface_to("127.0.0.1") == LOOPBACK
    assert interface_to("no.such.name.invalid") is None


def test_collectives_use_the_interface_that_leads_to_rank_0() -> None:
    own = interface_variables(row("cuda"), "127.0.0.1")
    assert own == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # On this host the name may be its loopback's, and on the others not.
    assert interface_variables(row("cpu"), "localhost") == {}
    assert interface_variables(row("cpu"), "no.such.name.invalid") == {}
