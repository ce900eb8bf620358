"""Sockets that listen, as the system lists them."""

from __future__ import annotations

import os
import socket

import pytest

from shardwise.doctor.listeners import listeners


@pytest.mark.parametrize(
    ("family", "address", "is_open"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::", True),
    ],
)
def test_a_listener_of_this_process(
    family: socket.AddressFamily, address: str, is_open: bool
) -> None:
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        (listener,) = [one for one in listeners([os.getpid()]) if one.port == port]
    assert (listener.pid, listener.address, listener.is_open) == (os.getpid(), address, is_open)
    assert not any(one.port == port for one in listeners([os.getpid()]))


def test_a_process_that_has_ended_has_none() -> None:
    assert listeners([2**22 + 1]) == []
