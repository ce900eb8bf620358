"""A connection to another process of the run, over TCP: messages with a payload.

Both ends prove that they know the run's token, by the standard library's challenge, before
anything else is read. Nothing is pickled: a message is JSON, and bytes.

    bytes of JSON: {"kind": "part", "nbytes": 300000, …} │ 256 KiB │ 44 KiB of payload
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
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
    return _proved(connection, token, (answer_challenge, deliver_challenge))


def accept(client: socket.socket, token: bytes, patience: float) -> Connection:
    """A connection of a worker that knows the token; see ``connect``."""
    return _proved(_over(client, patience), token, (deliver_challenge, answer_challenge))


def _proved(
    connection: Connection, token: bytes, proofs: Sequence[Callable[[Connection, bytes], None]]
) -> Connection:
    """The connection, after both ends have proved the token in this order; else it is closed."""
    try:
        for prove in proofs:
            prove(connection, token)
    except BaseException:
        connection.close()
        raise
    return connection


def _over(client: socket.socket, patience: float) -> Connection:
    """A connection whose reads and writes fail after ``patience`` seconds without a byte."""
    limit = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
    client.setblocking(True)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(client.detach())


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
