"""A connection to another worker in use: a thread reads, and another writes.

The writer says now and then that it is alive, so a frozen worker and a cut link are found by their
silence.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread

from shardwise.comm.machine.peer_connection import Message, receive, send


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


def _socket_of(connection: Connection) -> socket.socket:
    """Another descriptor of the same connection."""
    return socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
