"""A watchdog thread per rank: it reports slow peers, and ends waits that can never complete.

The thread checks twice a second whether its rank waits. After one second of waiting it publishes
the rank's progress to the store, reads that of the others, and decides by a pure function whether
the collective can complete. If it can, the watchdog logs for which ranks it waits and what their
heartbeats say. If not, it publishes the reason and interrupts the wait, on every rank with the same
message. Without it a rank would hang for half an hour, then raise "connection closed by peer".
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from shardwise.comm.protocol import ENDED
from shardwise.comm.watchdog import desync, heartbeat
from shardwise.comm.watchdog.call_site import joint_call, user_call
from shardwise.comm.watchdog.desync import Collective, RankProgress
from shardwise.comm.watchdog.heartbeat import Heartbeats
from shardwise.comm.watchdog.waited import Waited
from shardwise.comm.watchdog.waits_in_cpp import GLANCE, WaitsInCpp
from shardwise.errors import RanksDisagree

T = TypeVar("T")

POLL_INTERVAL = 0.5  # seconds between two checks whether this rank waits
FIRST_CHECK = 1.0  # seconds of waiting before the first look at other ranks
MAX_CHECK_INTERVAL = 10.0  # seconds
IN_TORCH = "it called a collective of torch that ends when all ranks have called it,"
HISTORY = 256  # collectives that a rank publishes

log = logging.getLogger("shardwise")


class Wait(NamedTuple):
    """A wait of this rank for a collective."""

    collective: Collective
    since: float  # ``monotonic()`` at its start
    peer: int | None = None  # the rank whose message is missing, if it is known
    is_complete: Callable[[], bool] = lambda: False  # for work on a stream, which ends unnoticed


class Watchdog:
    """One rank's watchdog over its group, through a store that all ranks share. Final.

    Args:
        store, timeout: see ``Group``.
        interrupt: makes every pending operation of this rank fail, from any thread.
        where, failure: see ``Shutdown``; ``where`` begins every message.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        interrupt: Callable[[], None],
        timeout: float,
        where: str = "",
        failure: Callable[[], str] = str,
    ) -> None:
        self.waits: Wait | None = None  # this rank's present wait
        self.on_device: deque[Wait] = deque()  # those of its device, oldest first
        self._moved = 0.0  # ``monotonic()`` when the device was last seen to end one
        self.failure = ""  # why the group has failed
        #: Is the connection to a rank closed? For a backend that knows.
        self.is_closed: Callable[[int], bool] = lambda _: False
        self._store, self._interrupt = store, interrupt
        self._rank, self.size = rank, size
        self._timeout, self._where, self._failed_before = timeout, where, failure
        self._recent: deque[Collective] = deque(maxlen=HISTORY)
        self._issued = 0
        self._heartbeats, self._next_beat = Heartbeats(store, rank), 0.0
        self._greetings = itertools.count(-HISTORY)  # numbers of what comes before collectives
        self._caller = threading.get_ident()  # whose stack has the user's program
        self._stop = threading.Event()
        self._waits, self._silence = WaitsInCpp(), 0.0  # of the store, in seconds
        self._thread = threading.Thread(target=self._run, name="shardwise-watchdog", daemon=True)
        self._thread.start()

    # --- called by the comm ----------------------------------------------------------------

    def raise_if_failed(self) -> None:
        if self.failure:
            raise RanksDisagree(self._where + self.failure)

    def issue(self, collective: Collective) -> None:
        """Record a collective; raises if the group has failed."""
        self.raise_if_failed()
        self._recent.append(collective)
        self._issued = collective.seq + 1

    @contextmanager
    def calling(self, collective: Collective) -> Iterator[None]:
        """A call of the backend, which may never return: it connects when it is used first."""
        before, self.waits = self.waits, Wait(collective, monotonic())
        try:
            yield
        finally:
            self.waits = before

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Leave the group, with the reason, where the block raises: the ranks meet inside."""
        try:
            yield
        except BaseException as error:
            self.leave(f"it raised {error!r}")
            raise

    def greet(
        self, purpose: str, text: str = "", rendezvous: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Every rank's ``text``, by rank, before the group is in use."""
        return self.gather_texts(self.greeting(purpose), text, rendezvous)

    def greeting(self, purpose: str) -> Collective:
        """Number what all ranks do before the group is in use."""
        return Collective(next(self._greetings), "greeting", purpose, "", 0)

    def gather_texts(
        self,
        collective: Collective,
        text: str,
        rendezvous: Callable[[], None] = lambda: None,
        is_gone: Callable[[int], bool] = lambda _: False,
    ) -> list[str]:
        """Every rank's ``text`` for this collective, by rank.

        Args:
            rendezvous: called when this rank's text is in the store; returns when all are.
            is_gone: has a rank's process ended? The store cannot tell a dead rank from a slow one.
        """
        self.issue(collective)
        self.waits = Wait(collective, monotonic())
        keys = [f"texts/{collective.seq}/{rank}" for rank in range(self.size)]
        pause = 0.0005
        try:
            self._store.set(keys[self._rank], text)
            rendezvous()
            while not self._store.check(keys):
                self.raise_if_failed()
                for peer in range(self.size):
                    if is_gone(peer) and not self._store.check([keys[peer]]):
                        raise self.explain(RuntimeError("its process has ended"), peer)
                sleep(pause)
                pause = min(0.05, 2 * pause)
            return [value.decode() for value in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise self.explain(error) from error
        finally:
            self.waits = None

    def fail(self, reason: str) -> RanksDisagree:
        """Fail the group on every rank, with the first reason that any rank published."""
        if not self.failure:
            try:
                self._check_store()
                self.failure = self._store.compare_set("verdict", "", reason).decode()
            except RuntimeError:
                self.failure = reason
            # After publishing: a rank whose connection closes reads the reason from the store.
            self._interrupt()
        return RanksDisagree(self._where + self.failure)

    def explain(self, error: BaseException, peer: int | None = None) -> RanksDisagree:
        """The failure behind the backend's ``error``, on a message from or to ``peer`` if any."""
        if self.failure:  # of which ``error`` is a consequence
            return self.fail(self.failure)
        waiting = {self._rank: self._recent[-1] if self.waits is None else self.waits.collective}
        try:
            self._check_store()
            # A rank publishes its reason before it closes connections, unless it was killed.
            if verdict := self._read("verdict"):
                return self.fail(verdict)
            ended = {rank: c for rank, c in self._read_progress().items() if c.ended}
            if (lost := peer if peer in ended else next(iter(ended), peer)) is None:
                lost = self._unreachable(ended)
            if lost is None:
                return self.fail(f"{waiting[self._rank]} failed on rank {self._rank}: {error}")
            return self.fail(self._why_gone(lost, ended, waiting[self._rank]))
        except RuntimeError:
            return self.fail(_without_store(error, waiting[self._rank], peer))

    def leave(self, reason: str, linger: float = 0.0) -> None:
        """Publish why this rank ends; wait up to ``linger`` seconds until all have, or are gone."""
        self._stop.set()
        if self._thread is not threading.current_thread():  # which may have found a comm unused
            self._thread.join()
            self._waits.close()
        closed = f"rank {self._rank} has left this process group ({reason})."
        self.failure = self.failure or closed
        try:
            self._check_store()
            self._publish(ended=reason)
            deadline = monotonic() + linger
            while monotonic() < deadline and not self._all_ended():
                sleep(0.02)
        except RuntimeError:
            log.debug("the store went before rank %d left", self._rank)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        waited, next_check = Waited(), FIRST_CHECK
        self._beat()  # at once: of a rank that sent none, nobody could say that it sends no more
        while not self._stop.wait(POLL_INTERVAL):
            self._beat()
            try:
                waits = None if self.failure else self._present()
            except RuntimeError as error:  # the device has failed
                self.explain(error)
                continue
            if waits is None:
                continue
            if waits.since != waited.since:  # a comm that polls makes many objects of one wait
                waited, next_check = Waited(waits.since), FIRST_CHECK
            if (age := waited.seconds) < next_check:
                continue
            reason, text = self._check(waits, age)
            if reason:
                self.fail(reason)
            elif waited.is_due() and text:
                log.warning("%s%s", self._where, text)
            next_check = min(waited.next, 1.25 * age, age + MAX_CHECK_INTERVAL)

    def _beat(self) -> None:
        """Send a heartbeat, if one is due."""
        if self.failure or monotonic() < self._next_beat:
            return
        try:
            last = self._recent[-1].details if self._recent else ""
            joint = str(self._issued) if joint_call(self._caller) else ""  # in this order
            self._ask(partial(self._heartbeats.send, last, joint))
            self._next_beat = monotonic() + heartbeat.INTERVAL
        except RuntimeError as error:  # a rank that does not wait needs no store
            self._next_beat = float("inf")
            if self._silence and (waits := self.waits):
                self.fail(_without_store(error, waits.collective, waits.peer))

    def _present(self) -> Wait | None:
        """The oldest wait that goes on; on a device, from when the one before it had ended."""
        while self.on_device and self.on_device[0].is_complete():
            self.on_device.popleft()
            self._moved = monotonic()
        waits = self.on_device[0] if self.on_device else self.waits
        if waits is None or waits.is_complete():
            return None
        return waits._replace(since=max(waits.since, self._moved))

    def _check(self, waits: Wait, age: float) -> tuple[str, str]:
        """Say why the wait can never complete (or ``""``), and the warning of ``still_waiting``."""
        try:
            return self._ask(partial(self._look, waits, age))
        except RuntimeError as error:
            return _without_store(error, waits.collective, waits.peer), ""

    def _look(self, waits: Wait, age: float) -> tuple[str, str]:
        collective = waits.collective
        self._publish(waits=collective.seq)
        progress = self._read_progress()
        silent = self._heartbeats.look(self.size)
        if not silent and age > heartbeat.FIRST_WARNING:  # so heartbeats are newer than this wait
            for rank, issued in self._heartbeats.joint().items():
                one = progress.get(rank, RankProgress())
                progress[rank] = one._replace(issued=issued, ended=IN_TORCH)
        reason = self._failed_before() or self._read("verdict") or desync.diagnose(progress)
        ended = {rank: one for rank, one in progress.items() if one.ended}
        if not reason and (lost := self._unreachable(ended, waits.peer)) is not None:
            reason = self._why_gone(lost, ended, collective)
        late = desync.missing_ranks(progress, self.size, collective)
        missing = late if waits.peer is None else [waits.peer]
        if not reason and age > self._timeout:
            reason = desync.timed_out(missing, age, {self._rank: collective})
            reason += desync.look_at({self._rank: user_call(self._caller)})
        awake = {rank: one for rank, one in progress.items() if rank not in silent}
        text = desync.still_waiting(self._rank, awake, missing, age, collective)
        return reason, text and text + self._heartbeats.describe(missing or silent, silent)

    def _unreachable(self, ended: Container[int], peer: int | None = None) -> int | None:
        """``peer``, or a rank that has not said that it ends, if the connection to it is closed."""
        some = [rank for rank in range(self.size) if rank != self._rank and rank not in ended]
        return next(filter(self.is_closed, some if peer is None else [peer]), None)

    def _why_gone(self, rank: int, ended: Mapping[int, RankProgress], at: Collective) -> str:
        """Say that a rank has gone while this one waits ``at`` a collective."""
        waiting, own = {self._rank: at}, desync.look_at({self._rank: user_call(self._caller)})
        if rank in ended:
            return desync.rank_left(rank, ended[rank].ended, ended[rank].issued, waiting) + own
        self._store.set(f"gone/{rank}", "")  # so that nobody waits until it leaves
        return desync.rank_died(rank, waiting) + own

    # --- the store -------------------------------------------------------------------------

    def _ask(self, call: Callable[[], T]) -> T:
        """The result of a call of the store; if it is long in coming, say so once."""
        silence = 0.0

        def look() -> None:
            nonlocal silence
            silence += GLANCE  # no clock: this process may have been frozen itself
            if self._stop.is_set() or silence > max(self._timeout, heartbeat.FIRST_WARNING):
                raise RuntimeError(f"no answer within {silence:,.0f} s")
            before = self._silence
            self._silence = silence if silence > heartbeat.FIRST_WARNING else 0.0
            if self._silence and not before:
                log.warning(
                    "%sthe store of the ranks has not answered for %.0f s: the process that serves "
                    "it, rank 0 or the launcher, is frozen, or its host cannot be reached. Rank "
                    "0's last heartbeat: %s",
                    *(self._where, silence, self._heartbeats.last(0)),
                )

        result = self._waits.carry_out(call, look)
        self._silence = 0.0
        return result

    def _check_store(self) -> None:
        """Raise ``RuntimeError`` while the store is silent: another call would wait, too."""
        if self._silence:
            raise RuntimeError("it is silent")

    def _publish(self, waits: int | None = None, ended: str = "") -> None:
        call = "" if ended else user_call(self._caller)
        progress = RankProgress(self._issued, tuple(self._recent.copy()), waits, ended, call)
        self._store.set(f"cursor/{self._rank}", json.dumps(progress))

    def _read_progress(self) -> dict[int, RankProgress]:
        """The progress of ranks that have waited long at some time, or have ended."""
        written = [r for r in range(self.size) if self._store.check([f"cursor/{r}"])]
        values = self._store.multi_get([f"cursor/{rank}" for rank in written])
        return {rank: _decode_progress(value) for rank, value in zip(written, values, strict=True)}

    def _all_ended(self) -> bool:
        ended = {rank for rank, one in self._read_progress().items() if one.ended}
        return all(n in ended or self._store.check([f"gone/{n}"]) for n in range(self.size))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A bound method that does not keep its object, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (present := reference()) is not None:
            present()

    return call


def process_exit_reason() -> str:
    """Say why this process ends; called at interpreter exit."""
    error: BaseException | None = getattr(sys, "last_value", None)  # set if nobody caught it
    return f"it raised {error!r}" if error else ENDED


def _decode_progress(value: bytes) -> RankProgress:
    issued, recent, *rest = json.loads(value)
    return RankProgress(issued, tuple(Collective(*fields) for fields in recent), *rest)


def _without_store(error: BaseException, collective: Collective, peer: int | None) -> str:
    subject = "" if peer is None else f"rank {peer} is gone, and "
    return (
        f"{subject}the store of the ranks does not answer any more ({error}) while this rank waits "
        f"at {collective.details}. The process that served it, rank 0 or the launcher, has ended "
        "or is frozen. This group cannot be used any more. Read that process's own output, then "
        "start again."
    )
