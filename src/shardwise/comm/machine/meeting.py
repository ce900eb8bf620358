"""The ranks of a launch meet at a store, before there is a process group.

torch waits in C++ for up to half an hour, deaf to Ctrl-C, with stack frames or with nothing. Here
each rank looks in short steps, and says what it waits for:

    1. reach the store    its host's name resolves, and its port answers
    2. be there           each rank writes its host and process, so all know who is missing
    3. connect            on a thread; an error of one rank is in the store, and ends all waits

A launcher's store may outlive the ranks, and each host counts its own restarts. So ranks meet in
rounds: one that finds an earlier process of its own in the open round opens the next, and those
who wait go there. Who has met already is told that a rank was started again.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import TypeVar

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.comm.machine.endpoint import listener, own_endpoint, problem
from shardwise.comm.machine.environment import Launch
from shardwise.comm.machine.run_token import RUN_TOKEN, derived, run_token
from shardwise.comm.transports.shared_memory import proc_namespace
from shardwise.comm.watchdog.desync import format_ranks
from shardwise.comm.watchdog.heartbeat import Heartbeats
from shardwise.comm.watchdog.waited import Waited
from shardwise.comm.watchdog.waits_in_cpp import WaitsInCpp
from shardwise.errors import ConfigError, RanksDisagree, ShardwiseError

T = TypeVar("T")

POLL_INTERVAL = 0.05  # seconds
LOOK_INTERVAL = 1.0  # seconds between two looks at the processes of this host
LINGER = 1.0  # seconds for which a failed rank goes on serving the store, so others read why
CHECKS = (
    "Nothing has started. Check that every rank was started with the same MASTER_ADDR, "
    "MASTER_PORT and WORLD_SIZE, and that no firewall or wrong network interface lies between them."
)

log = logging.getLogger("shardwise")
_meetings = itertools.count()  # of this process; every rank holds the same number of them


class Meeting:
    """One rank's part in it. Final.

    Args:
        launch: which rank this is, and where the store is.
        timeout: seconds that the ranks have to meet.
        attempt: how often the launcher of this host has restarted its ranks.
    """

    def __init__(self, launch: Launch, serves: bool, timeout: float, attempt: str) -> None:
        self._launch, self._serves, self._timeout = launch, serves, timeout
        name = f"[{launch.address}]" if ":" in launch.address else launch.address  # of IPv6
        self._place = f"{name}:{launch.port}"
        self._waited, self._next_look = Waited(), 0.0
        # Of lines with a rank and its process, which is 0 once it is connected.
        self._processes = f"host/{proc_namespace()}"
        number, token = next(_meetings), run_token()
        self._prefix = f"shardwise/{derived(token, 'meeting')}/{number}/"
        self._attempt, self._round, self._has_met = attempt, 0, False
        self._fingerprint = derived(token, "fingerprint")
        # Of lines that all processes write, those with another token, too: see ``_refuse``.
        self._arrivals = f"shardwise/arrivals/{number}"
        self._store: Store | None = None
        self._beats: Heartbeats | None = None
        self._frozen: dict[int, float] = {}  # ranks that send no heartbeats, and for how long
        self._client: Store | None = None

    def store(self) -> Store:
        """The store, for a process group, once every rank is there.

        Raises:
            ConfigError: another process says that it is this rank.
            RanksDisagree: a rank did not come in time, or gave up.
        """
        self._client = client = self._open()
        line = f"{self._launch.rank} {self._fingerprint} {self._name}\n"
        client.append(self._arrivals, line)  # type: ignore[attr-defined]
        self._store = self._appear(client)
        while not self._all_are_there(self._store):
            self._check(self._missing)
            sleep(POLL_INTERVAL)
            if self._is_over():
                self._store = self._appear(client, opens=False)
        self._has_met = True
        return PrefixStore(f"{self._prefix}{self._round}/group/", new_client(client))

    def run(self, call: Callable[[], T]) -> T:
        """The result of ``call``, which connects all ranks in C++.

        Raises:
            RanksDisagree: another rank gave up, or it took too long.
        """
        # Where the process ends meanwhile, the thread keeps ``self``, and so the store that rank 0
        # serves: without it torch would raise in the thread, and abort the process.
        result = self._run(lambda: self._carry_out(call), lambda: "not all connections are made")
        self._write_process(0)
        return result

    def watch(self, call: Callable[[], T]) -> T:
        """Run ``call`` on this thread, so that nothing can end it: what is wrong is logged."""
        done = Event()

        def look() -> None:
            try:
                while not done.wait(POLL_INTERVAL):
                    self._check(lambda: "not all connections are made")
            except RanksDisagree as error:
                log.warning("%s", error)

        watcher = Thread(target=look, name="shardwise-connect", daemon=True)
        watcher.start()
        try:
            return call()
        finally:
            done.set()
            watcher.join()
            self._write_process(0)

    def failure(self) -> str:
        """Say why a rank has given up; ``""`` if none has."""
        if self._store is None:
            return ""
        if self._store.check(["failed"]):
            return self._store.get("failed").decode()
        again = "a rank was started again after all had met, and waits for the others to be"
        return again * (self._has_met and self._is_over())

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up, and why."""
        if self._store is None:
            return
        cause = str(error).rstrip(".") if isinstance(error, ShardwiseError) else repr(error)
        with suppress(RuntimeError):
            text = f"rank {self._launch.rank} could not connect: {cause}"
            self._store.compare_set("failed", "", text)
            sleep(LINGER if self._serves else 0.0)

    # ---- its steps -----------------------------------------------------------------------------

    def _open(self) -> Store:
        """A client of the store, which rank 0 serves from now on."""
        launch, address = self._launch, self._launch.address
        own = own_endpoint(launch, os.environ) if self._serves else ""
        listens = listener(own, launch.port) if self._serves else None
        if listens is not None:  # else another rank 0 may serve it
            address = own
        while listens is None and (why := problem(address, launch.port)):
            self._check(lambda why=why: why)  # type: ignore[misc]
            sleep(POLL_INTERVAL)

        def open_store() -> Store:
            return TCPStore(
                address,
                launch.port,
                launch.size,
                listens is not None,
                timedelta(seconds=self._timeout),
                wait_for_workers=False,
                multi_tenant=listens is not None,
                master_listen_fd=None if listens is None else listens.detach(),
            )

        server = "the store of this rank" if listens else "a launcher that starts, or a program,"
        silent = f"{server} has not answered as a store of torch does"
        return self._run(open_store, lambda: problem(address, launch.port) or silent)

    def _refuse(self) -> str:
        """Name the processes of another token; raise if this one is of them, as rank 0 decides."""
        assert self._client is not None
        lines = self._client.get(self._arrivals).decode()
        arrived = [line.split(" ", 2) for line in lines.splitlines()]
        first = next((one for one in arrived if one[0] == "0"), None)
        if first is not None and first[1] != self._fingerprint:
            raise ConfigError(
                f"{self._name} is not let in as rank {self._launch.rank}: its run token is "
                f"another one than that of rank 0, {first[2]}. Set {RUN_TOKEN} to the same secret "
                "on all ranks, or give each run a MASTER_PORT of its own."
            )
        return "".join(
            f"; {name} says that it is rank {rank}, with another {RUN_TOKEN}, and is not let in"
            for rank, fingerprint, name in arrived
            if fingerprint != self._fingerprint
        )

    def _is_over(self) -> bool:
        """Has a rank opened another round?"""
        assert self._client is not None
        with suppress(RuntimeError):  # the store has ended, which ``_check`` says in a sentence
            return int(self._client.get(f"{self._prefix}round")) > self._round
        return False

    def _appear(self, client: Store, opens: bool = True) -> Store:
        """Write down that this rank is there, in the open round; returns the store of that.

        Args:
            opens: open the next round if an earlier process of this rank is in it.
        """
        launch, key = self._launch, f"{self._prefix}round"
        number = client.compare_set(key, "", "0")
        while True:
            self._round, store = int(number), PrefixStore(f"{self._prefix}{int(number)}/", client)
            own = f"{self._attempt} {self._name}"
            other = store.compare_set(f"rank/{launch.rank}", "", own).decode()
            attempt, _, name = other.partition(" ")
            if attempt == self._attempt or not opens:
                break
            number = client.compare_set(key, number.decode(), str(self._round + 1))
        self._store, self._beats = store, Heartbeats(store, launch.rank)
        if name != self._name:
            raise ConfigError(
                f"two processes are rank {launch.rank} of {launch.size}: {name}, and "
                f"{self._name}. One of them would wait for ever. Give each process a rank of its "
                "own, and each run a MASTER_PORT of its own."
            )
        size = store.compare_set("size", "", str(launch.size)).decode()
        if size != str(launch.size):
            raise ConfigError(
                f"rank {launch.rank} was started as one of {launch.size} ranks, and a rank before "
                f"it as one of {size}. Start all with the same WORLD_SIZE."
            )
        self._write_process(os.getpid())
        return store

    @property
    def _name(self) -> str:
        return f"process {os.getpid()} on {platform.node()}"

    def _write_process(self, pid: int) -> None:
        """Tell the ranks of this host which process to look at; ``0``: none any more."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # rank 0 may have closed the store, once all are connected
            line = f"{self._launch.rank} {pid}\n"
            self._store.append(self._processes, line)  # type: ignore[attr-defined]
            if self._beats is not None and not pid:
                self._beats.end()

    def _all_are_there(self, store: Store) -> bool:
        try:
            return store.check([f"rank/{rank}" for rank in range(self._launch.size)])
        except RuntimeError:  # the store has ended, which ``_check`` says in a sentence
            return False

    def _missing(self) -> str:
        """Name the ranks that have not arrived."""
        assert self._store is not None
        ranks = range(self._launch.size)
        missing = [rank for rank in ranks if not self._store.check([f"rank/{rank}"])]
        verb = "is" if len(missing) == 1 else "are"
        who = f"{format_ranks(missing)} {verb} not there" if missing else "all are there"
        return who + self._refuse()

    def _carry_out(self, call: Callable[[], T]) -> T:
        return call()

    # ---- waiting -------------------------------------------------------------------------------

    def _run(self, call: Callable[[], T], why: Callable[[], str]) -> T:
        try:
            return WaitsInCpp().carry_out(call, lambda: self._check(why), POLL_INTERVAL)
        except DistError as error:
            raise RanksDisagree(f"the ranks cannot connect ({error}). {CHECKS}") from error

    def _check(self, why: Callable[[], str]) -> None:
        """Say now and then why this rank waits; raise after the time limit."""
        if failure := self._read_failure():
            raise RanksDisagree(f"{failure}. Nothing has started.")
        frozen = self._frozen
        silent = self._beats.describe(frozen, frozen) if frozen and self._beats else ""
        if self._waited.seconds > self._timeout:
            raise RanksDisagree(
                f"the ranks did not all connect to {self._place} within {self._timeout:,.0f} s: "
                f"{why()}. {CHECKS}{silent}"
            )
        if self._waited.is_due():
            waited = f"has waited {self._waited.seconds:,.0f} s to meet the others"
            who = f"rank {self._launch.rank} {waited}"
            log.warning("%s at %s: %s%s", who, self._place, why(), silent)

    def _read_failure(self) -> str:
        try:
            return self.failure() or self._ended()
        except RuntimeError as error:
            return (
                f"the store at {self._place} does not answer any more ({error}): the process that "
                "served it, rank 0 or the launcher, has ended; read its own output"
            )

    def _ended(self) -> str:
        """Name a rank of this host that was killed, and so could not say that it gives up."""
        if self._store is None or (now := monotonic()) < self._next_look:
            return ""
        self._next_look = now + LOOK_INTERVAL
        self._refuse()
        if self._beats is not None:
            self._beats.send()
            self._frozen = self._beats.look(self._launch.size)
        lines = self._store.get(self._processes).decode().splitlines()
        for rank, pid in dict(line.split() for line in lines).items():
            if _has_ended(pid):
                return f"rank {rank} (process {pid}) has ended; read its own output"
        return ""


def _has_ended(pid: str) -> bool:
    """Has this process ended? One whose parent has not waited for it has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return pid != "0"


def new_client(store: Store) -> Store:
    """Another client of the same store, whose blocking calls those of ``store`` do not wait for."""
    socket.socket().close()  # raises if this process can open none, which torch would try for long
    return store.clone()  # type: ignore[attr-defined, no-any-return]
