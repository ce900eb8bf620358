"""The store at which ranks meet, on the loopback interface only.

torch itself would listen on all interfaces, so it gets a socket that already listens.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from shardwise.launch.fork import Fork

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def store(server: socket.socket) -> TCPStore:
    """A store in this process, which answers at ``server`` as long as it is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1",
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def forked_store(server: socket.socket) -> Fork:
    """A store in a process of its own, which nothing ends but SIGKILL."""

    def serve() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        served = [store(server)]
        while served:
            signal.pause()

    with server:
        return Fork(serve, ["shardwise-store"], os.environ, server.fileno())
