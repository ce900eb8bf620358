"""The addresses of all workers, and the number of this one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from shardwise.comm.machine.peer_connection import Address, Message, connect, receive, send
from shardwise.comm.watchdog.waited import Waited
from shardwise.errors import ConfigError

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Place:
    """This worker among the others.

    Attributes:
        addresses: of rank 0 of each worker, in the same order everywhere.
        worker: the number of this one.
        token: a secret of the run, without which no connection is made.
        patience: seconds of silence after which a worker is lost.
        timeout: seconds for which a worker waits for the others when it starts.
        stops: asked while it waits for others, whether it is to leave them.
        updates: how often its start has moved; others are told it, and follow who has most.
    """

    addresses: Sequence[Address]
    worker: int
    token: bytes
    patience: float = 10.0
    timeout: float = 600.0
    stops: Callable[[], bool] = lambda: False
    updates: Callable[[], int] = lambda: 0

    @property
    def others(self) -> list[int]:
        return [number for number in range(len(self.addresses)) if number != self.worker]

    def name(self, worker: int) -> str:
        """``worker 1 (10.0.0.2:29600)``."""
        host, port = self.addresses[worker]
        return f"worker {worker} ({host}:{port})"

    def say(self, waited: Waited, what: str) -> None:
        """Say now and then what this worker waits for."""
        if waited.is_due():
            log.warning("worker %d has waited %.0f s: %s", self.worker, waited.seconds, what)

    def listen(self) -> socket.socket:
        """Listen at this worker's own address, and at no other."""
        host, port = self.addresses[self.worker]
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"{self.name(self.worker)} cannot listen at its own address ({error.strerror}). "
                "Name an address of this host that the others reach, and a port that is free."
            ) from error

    def connect(self, worker: int) -> Connection:
        """A connection to another worker."""
        return connect(self.addresses[worker], self.token, self.patience)

    def ask(self, worker: int) -> dict[str, int] | None:
        """Ask a worker whether it leads; ``None``: it does not answer."""
        try:
            with self.connect(worker) as connection:
                send(connection, Message("who", {}))
                return receive(connection).fields
        except AuthenticationError as error:
            raise ConfigError(
                f"{self.name(worker)} has another run token, so it is of another run, or no "
                "worker. Set SHARDWISE_RUN_TOKEN to the same secret on all of them."
            ) from error
        except (OSError, EOFError, ValueError):
            return None

    def refusal(
        self, worker: int, is_there: bool, own: Mapping[str, str], other: Mapping[str, str]
    ) -> str:
        """Say why another worker cannot follow this one; ``""`` if it can. Pure.

        Args:
            is_there: a process that is this worker takes part.
            own, other: what must be alike: name → short text.
        """
        for name, text in own.items():
            if other.get(name) != text:
                return (
                    f"worker {worker} has {name} {other.get(name)}, and worker {self.worker}, "
                    f"which leads, has {text}. Their means would be of unlike things. Start all "
                    "workers with one recipe or program."
                )
        if worker not in self.others or is_there:
            return (
                f"two processes are worker {worker}. Give each a number of its own, from 0 to "
                f"{len(self.addresses) - 1}; where a lost worker was started again, try again in "
                f"{self.patience:g} s."
            )
        return ""
