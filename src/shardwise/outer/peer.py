"""A connection to another worker: messages with a payload, over TCP.

Both ends prove that they know the run's token, by the standard library's challenge, before
anything else is read. Nothing is pickled: a message is JSON, and bytes. A thread reads and another
writes; the writer says now and then that it is alive, so a frozen worker and a cut link are found
by their silence.

    bytes of JSON: {"kind": "part", "nbytes": 300000, …} │ 256 KiB │ 44 KiB of payload
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

CHUNK = 256 * 1024  # bytes of a payload that are sent at once: each shows that its sender is alive
LONGEST_HEADER = 1 << 16
CONNECT_TIMEOUT = 2.0  # seconds in which another host has to answer


class Message(NamedTuple):
    """One message between workers."""

    kind: str
    fields: dict[str, Any]
    payload: bytes | memoryview = b""


Address = tuple[str, int]


def connect(address: Address, token: bytes, patience: float) -> Connection:
    """A connection to a worker that listens.

    Raises:
        OSError: nothing answers there.
        multiprocessing.AuthenticationError: it has another token.
    """
    connection = _over(socket.create_connection(address, CONNECT_TIMEOUT), patience)
    with closing_on_error(connection):
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
    return connection


def accept(client: socket.socket, token: bytes, patience: float) -> Connection:
    """A connection of a worker that knows the token; see ``connect``."""
    connection = _over(client, patience)
    with closing_on_error(connection):
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
    return connection


class closing_on_error:  # noqa: N801 - a context manager is written like a function
    """Close a connection if the block raises."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._connection.close()


def _over(client: socket.socket, patience: float) -> Connection:
    """A connection whose reads and writes fail after ``patience`` seconds without a byte."""
    limit = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
    client.setblocking(True)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client.detach())


def _socket_of(connection: Connection) -> socket.socket:
    """Another descriptor of the same connection."""
    return socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def send(connection: Connection, message: Message) -> None:
    """Send a message."""
    header = {"kind": message.kind, "nbytes": len(message.payload), **message.fields}
    connection.send_bytes(json.dumps(header).encode())
    view = memoryview(message.payload)
    for start in range(0, len(view), CHUNK):
        connection.send_bytes(view[start : start + CHUNK])


def receive(connection: Connection) -> Message:
    """The next message.

    Raises:
        EOFError, OSError: the connection has ended, or was silent for too long.
        ValueError, KeyError: it is not ours.
    """
    header = json.loads(connection.recv_bytes(LONGEST_HEADER))
    kind, nbytes = str(header.pop("kind")), int(header.pop("nbytes"))
    payload = bytearray()
    while len(payload) < nbytes:
        payload += connection.recv_bytes(CHUNK)
    return Message(kind, header, bytes(payload))


class Peer:
    """A connection in use. Final.

    Args:
        worker: the number of the other worker.
        on_message: called by the reading thread.
        on_lost: called once, with the reason, when the connection has ended.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        patience: float,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer, str], None],
    ) -> None:
        self.worker, self.sent, self.received = worker, 0, 0  # bytes of payloads
        self._connection, self._on_message, self._on_lost = connection, on_message, on_lost
        self._interval, self._patience = patience / 4, patience
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        name = f"shardwise-worker-{worker}"
        self._writer = Thread(target=self._write, name=name, daemon=True)
        self._reader = Thread(target=self._read, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read and to write."""
        self._writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send it when those before it are sent."""
        self.sent += len(message.payload)
        self._outbox.put(message)

    def close(self) -> None:
        """End the connection when all is sent; the other end finds it closed."""
        self._outbox.put(None)
        self._writer.join(self._patience)

    def _read(self) -> None:
        reason = "it closed its connection"
        try:
            while True:
                message = receive(self._connection)
                self.received += len(message.payload)
                if message.kind != "alive":
                    self._on_message(self, message)
        except BlockingIOError:
            reason = f"it was silent for {self._patience:g} s"
        except (EOFError, OSError, ValueError, KeyError) as error:
            reason = f"{reason} ({error})" if str(error) else reason
        self._outbox.put(None)
        self._writer.join(self._patience)
        self._connection.close()
        self._on_lost(self, reason)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._next()) is not None:
                send(self._connection, message)
        # Closed at once, what the other end has not read yet could be lost with what it sends.
        with suppress(OSError), _socket_of(self._connection) as client:
            client.shutdown(socket.SHUT_WR)

    def _next(self) -> Message | None:
        try:
            return self._outbox.get(timeout=self._interval)
        except Empty:
            return Message("alive", {})
