from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from shardwise.comm.machine.peer_connection import CHUNK, Message, accept, connect, receive, send


@contextmanager
def connected(
    token: bytes = b"t", patience: float = 5.0
) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection: of who connects with ``token``, and of who accepts ``b"t"``."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, server.getsockname(), token, patience)
        with accept(server.accept()[0], b"t", patience) as one, connecting.result() as other:
            yield one, other


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, 2 * CHUNK + 7])
def test_a_message_arrives_as_it_was_sent(nbytes: int) -> None:
    message = Message("part", {"key": "a", "number": 3}, bytes(range(256)) * (nbytes // 256 + 1))
    message = message._replace(payload=message.payload[:nbytes])
    with connected() as (one, other), ThreadPoolExecutor(1) as pool:
        pool.map(lambda each: send(one, each), [message, Message("alive", {})])
        assert [receive(other), receive(other)] == [message, Message("alive", {})]


def test_a_peer_that_sends_nothing_is_an_error_after_patience() -> None:
    with connected(patience=0.2) as (one, _), pytest.raises(BlockingIOError):
        receive(one)


def test_a_peer_with_another_token_is_refused() -> None:
    with pytest.raises(AuthenticationError), connected(b"other"):
        pass
