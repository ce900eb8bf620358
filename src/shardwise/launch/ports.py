"""A port where the ranks of one machine meet.

A script that fixes MASTER_PORT cannot run twice at the same time: the second run waits in the
first one's store, or fails in it.
"""

from __future__ import annotations

import socket

from shardwise.errors import ConfigError

LAST = 65_535


def free_port(wanted: int) -> int:
    """``wanted``, or the next higher port that no program on this machine listens at.

    Raises:
        ConfigError: there is none.
    """
    for port in range(wanted, LAST + 1):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"every port from {wanted} to {LAST} is in use on this machine, so the ranks cannot "
        "connect. Choose a lower one."
    )
