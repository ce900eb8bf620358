"""Links between nodes, measured: can each connect to each, how late, how fast, by which clock.

Each node listens at the interface of its collectives, as they will, and connects to every other
one. In a round each node takes part in one measurement at most, so that they do not share a link:

    round 0   0 → 1   2 → 3        round 1   1 → 0   3 → 2        round 2   0 → 2   3 → 1   …
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from statistics import median
from threading import Thread
from time import perf_counter, time
from typing import NamedTuple

from shardwise.comm.machine.peer_connection import Message, accept, connect, receive, send

PINGS = 20
PATIENCE = 5.0  # seconds without a byte
FIRST, LARGEST = 2**20, 2**26  # bytes that are sent
SECONDS = 0.3  # for which the second sending shall last


class Measured(NamedTuple):
    """A link from one node to another.

    Attributes:
        source, target: the nodes' ranks.
        latency: seconds of half a round trip, the median.
        bandwidth: bytes per second over one connection.
        skew: seconds by which the target's clock is ahead.
        problem: why there is no connection; then the others are 0.
    """

    source: int
    target: int
    latency: float = 0.0
    bandwidth: float = 0.0
    skew: float = 0.0
    problem: str = ""


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Ordered pairs of different nodes, each once; in a round no node is in two. Pure."""
    ring: list[int | None] = [*nodes, *[None] * (len(nodes) % 2)]
    paired: list[list[tuple[int, int]]] = []
    for _ in range(len(ring) - 1):
        facing = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        pairs = [(a, b) for a, b in facing if a is not None and b is not None]
        paired += [pairs, [(b, a) for a, b in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return paired


class Answers:
    """A listener that answers measurements of processes that know the token. Final."""

    def __init__(self, address: str, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._token = token
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, name="shardwise-doctor", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with (
            suppress(OSError, EOFError, ValueError, AuthenticationError),
            accept(client, self._token, PATIENCE) as connection,
        ):
            while True:
                receive(connection)
                send(connection, Message("answer", {"time": time()}))


def measure(source: int, target: int, address: tuple[str, int], token: bytes) -> Measured:
    """The link to a node that answers there."""
    try:
        with connect(address, token, PATIENCE) as connection:
            trips = [_ping(connection) for _ in range(PINGS)]
            latency = median(trip for trip, _ in trips) / 2
            rate = _rate(connection, FIRST, latency)
            size = min(LARGEST, max(FIRST, int(rate * SECONDS)))
            rate = _rate(connection, size, latency) if size > FIRST else rate
            return Measured(source, target, latency, rate, min(trips)[1])
    except TimeoutError:
        problem = "it does not answer"
    except AuthenticationError:
        problem = "another program answers, which does not know the run's token"
    except (OSError, EOFError) as error:
        problem = str(getattr(error, "strerror", "") or "the connection ended").lower()
    return Measured(source, target, problem=problem)


def _ping(connection: Connection) -> tuple[float, float]:
    """Seconds of a round trip, and by how much the other clock is ahead."""
    start, now = perf_counter(), time()
    send(connection, Message("ping", {}))
    peer_time = float(receive(connection).fields["time"])
    trip = perf_counter() - start
    return trip, peer_time - now - trip / 2


def _rate(connection: Connection, size: int, latency: float) -> float:
    """Bytes per second until all have arrived."""
    payload = bytes(size)
    start = perf_counter()
    send(connection, Message("data", {}, payload))
    receive(connection)
    return size / max(perf_counter() - start - 2 * latency, 1e-9)
