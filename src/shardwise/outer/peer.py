"""A connection to another worker in use: a thread reads, and another writes.

The writer says now and then that it is alive, so a frozen worker and a cut link are found by their
silence.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import NamedTuple

from shardwise.comm.machine.peer_connection import Message, receive, send

TCP_CLOSE = 7  # a state of a connection, of Linux
POLL_INTERVAL = 0.02  # seconds between two looks at what is unsent


class Peer:
    """A connection in use. Final.

    Args:
        worker: the number of the other worker.
        on_message: called by the reading thread.
        on_lost: called once, with the reason, when the connection has ended.

    Attributes:
        sent, received: bytes of payloads.
        written: those of ``sent`` that do not wait any more.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        patience: float,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer, str], None],
    ) -> None:
        self.worker = worker
        self.sent, self.written, self.received = 0, 0, 0
        self._connection, self._on_message, self._on_lost = connection, on_message, on_lost
        self._interval, self._patience, self._is_heard = patience / 4, patience, True
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
        """End the connection when all is sent, in whatever time that takes while it goes on."""
        self._outbox.put(None)
        self._writer.join()  # without a byte for ``patience`` seconds it fails

    def _read(self) -> None:
        reason = "it closed its connection"
        try:
            while True:
                message = receive(self._connection)
                self.received += len(message.payload)
                if message.kind != "alive":
                    self._on_message(self, message)
        except EOFError:  # it may still read
            pass
        except BlockingIOError:
            self._is_heard = False
            reason = f"it was silent for {self._patience:g} s"
        except Exception as error:  # noqa: BLE001 - a reader that ends unheard is awaited for ever
            self._is_heard = False
            reason = f"{reason} ({error})" if str(error) else reason
        self.close()
        self._connection.close()
        self._on_lost(self, reason)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._next()) is not None:
                send(self._connection, message)
                self.written += len(message.payload)
        # Closed at once, what the other end has not read yet could be lost with what it sends.
        with suppress(OSError), _socket_of(self._connection) as client:
            client.shutdown(socket.SHUT_WR)
            if self._is_heard:
                _wait_until_sent(client, self._patience)

    def _next(self) -> Message | None:
        try:
            return self._outbox.get(timeout=self._interval)
        except Empty:
            return Message("alive", {})


class Joining(NamedTuple):
    """A worker that asks to take part."""

    peer: Peer
    digest: str  # of its state


def _socket_of(connection: Connection) -> socket.socket:
    """Another descriptor of the same connection."""
    return socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def _wait_until_sent(client: socket.socket, patience: float) -> None:
    """Wait until the other end has all: what this process leaves behind may not arrive."""
    deadline, before = monotonic() + patience, -1
    while (unsent := _unsent(client)) and monotonic() < deadline:
        if unsent != before:
            deadline, before = monotonic() + patience, unsent
        sleep(POLL_INTERVAL)


def _unsent(client: socket.socket) -> int:
    """Bytes that the other end has not acknowledged; 0 where it is gone, or that is not known."""
    if sys.platform != "linux" or _is_reset(client):
        return 0
    import fcntl  # of Unix alone
    import termios

    count = fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(count, sys.byteorder)


def _is_reset(client: socket.socket) -> bool:
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
