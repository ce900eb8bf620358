"""The address where ranks meet: where rank 0 listens, and what others find there."""

from __future__ import annotations

import socket
from functools import partial

import pytest

from shardwise.comm.machine.endpoint import listener, on_one_host, own_address, own_endpoint, probe
from shardwise.comm.machine.environment import Launch
from shardwise.errors import ConfigError
from tests.ranks import free_port

HERE = ("127.0.0.1", "10.0.0.2", "192.168.1.9")
OUTWARD = ("10.0.0.2", "192.168.1.9")


@pytest.mark.parametrize(
    ("resolved", "here", "source", "outward", "expected"),
    [
        (["10.0.0.2"], HERE, "10.0.0.2", OUTWARD, "10.0.0.2"),
        (["127.0.0.1"], HERE, "127.0.0.1", (), "127.0.0.1"),
        (["127.0.1.1"], HERE, "127.0.0.1", (), "127.0.1.1"),  # as Debian names a host: one host
        (["127.0.1.1"], HERE, "127.0.0.1", OUTWARD, "10.0.0.2"),  # several hosts
        (["127.0.1.1", "192.168.1.9"], HERE, "127.0.0.1", OUTWARD, "192.168.1.9"),
        (["54.1.2.3"], HERE, "10.0.0.2", OUTWARD, "10.0.0.2"),  # a router's address
        (["0.0.0.0"], HERE, "127.0.0.1", (), "127.0.0.1"),
        (["10.0.0.2"], (), "", (), "10.0.0.2"),  # this host's addresses are not known
        ([], HERE, "", (), "127.0.0.1"),
    ],
)
def test_the_address_at_which_rank_0_listens(
    resolved: list[str], here: tuple[str, ...], source: str, outward: tuple[str, ...], expected: str
) -> None:
    assert own_address(resolved, here, source, outward) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_loopback_interface_that_is_named_is_taken(host: str) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "LOCAL_WORLD_SIZE": "1"}
    address = own_endpoint(Launch(0, 2, 0, host, 9), variables)
    assert address in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "1"}, "10.0.0.2"),
        ({}, "10.0.0.2"),
    ],
)
def test_ranks_of_one_host_meet_at_its_loopback_interface(
    variables: dict[str, str], address: str
) -> None:
    launch = Launch(1, 2, 1, "10.0.0.2", 29500)
    assert on_one_host(launch, variables) == launch._replace(address=address)


def test_a_listener_is_at_one_address_and_at_a_port_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert listener("127.0.0.1", port) is None
        second = listener("127.0.0.2", port)
        assert second is not None
        with second:
            assert second.getsockname() == ("127.0.0.2", port)


def test_an_address_of_another_host_is_no_place_to_listen() -> None:
    with pytest.raises(ConfigError, match=r"^rank 0 cannot listen at port 9999 of 192\.0\.2\.1"):
        listener("192.0.2.1", 9999)


def test_the_address_is_probed_without_a_meeting() -> None:
    port = free_port()
    at = partial(Launch, size=2, local_rank=0, address="127.0.0.1", port=port)
    assert probe(at(0)) == "the name resolves, and the port is free for rank 0"
    assert probe(at(1)).startswith(f"no program listens at port {port} of 127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        assert probe(at(1)).startswith("a program answers")
    assert "nowhere.invalid does not resolve" in probe(at(0, address="nowhere.invalid"))
