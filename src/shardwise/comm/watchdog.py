"""Agreement in the step: no rank waits without saying so, and no rank waits for ever.

A thread looks twice a second at what its rank waits for. From one second on it writes the rank's
cursor to the store, reads the others', and decides by a pure function whether they can ever meet.
While they can, it says for whom it waits; once they cannot, it publishes why and interrupts the
wait, on every rank with the same sentence. The ordinary way is a hang of thirty minutes, then
"connection closed by peer". While nobody waits this costs two wake-ups a second.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from shardwise.comm.desync import (
    Collective,
    Cursor,
    absent,
    decide,
    gone,
    late,
    left,
    slow,
)
from shardwise.errors import RanksDisagree

__all__ = ["Wait", "Watchdog", "how_this_process_ends"]

TICK = 0.5  # seconds between two looks at whether this rank waits
PATIENCE = 1.0  # seconds of waiting before the first look at the others
SAY = 5.0  # seconds of waiting before the first log line; then at twice the time, and so on
SAY_AT_START = 20.0  # the same while the group is made: a busy machine starts ranks at many speeds
SLOWEST = 10.0  # seconds between two looks at the others, at most
RECENT = 256  # collectives that a cursor remembers

log = logging.getLogger("shardwise")


class Wait(NamedTuple):
    """What this rank waits for.

    Attributes:
        collective: the one it waits for.
        since: ``monotonic()`` when it began.
        peer: the rank whose message is missing, or -1 if unknown.
        over: whether it is complete although nobody took note (a stream's work ends unseen).
    """

    collective: Collective
    since: float
    peer: int = -1
    over: Callable[[], bool] = lambda: False


class Watchdog:
    """One rank's watchdog over its group, through a store that all ranks share. Final.

    Args:
        store: the group's own, with no other user's keys.
        interrupt: makes every pending operation of this rank fail, from any thread.
        timeout: seconds after which waiting for a rank that is merely slow becomes an error.
    """

    def __init__(
        self, store: Store, rank: int, size: int, interrupt: Callable[[], None], timeout: float
    ) -> None:
        self.waits: Wait | None = None
        self._dead = ""
        self._store = store
        self._rank = rank
        self._size = size
        self._interrupt = interrupt
        self._timeout = timeout
        self._recent: deque[Collective] = deque(maxlen=RECENT)
        self._issued = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-watchdog", daemon=True)
        self._thread.start()

    # --- what the comm calls ---------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Did anything end the group?"""
        return bool(self._dead)

    def raise_if_dead(self) -> None:
        """Raise what ended the group, if anything did."""
        if self._dead:
            raise RanksDisagree(self._dead)

    def issue(self, collective: Collective) -> None:
        """Take note of a collective, or raise what ended the group."""
        self.raise_if_dead()
        self._recent.append(collective)
        self._issued = collective.seq + 1

    def gather_texts(
        self,
        collective: Collective,
        text: str,
        meet: Callable[[], None] = lambda: None,
        is_gone: Callable[[int], bool] = lambda _: False,
    ) -> list[str]:
        """Every rank's ``text`` for one and the same collective, by rank.

        Args:
            meet: called when this rank's text is in the store; if it returns, all ranks' are.
            is_gone: has a rank's process ended? The store alone cannot tell that from slow.
        """
        self.issue(collective)
        self.waits = Wait(collective, monotonic())
        keys = [f"texts/{collective.seq}/{rank}" for rank in range(self._size)]
        pause = 0.0005
        try:
            self._store.set(keys[self._rank], text)
            meet()
            while not self._store.check(keys):
                if self._dead:
                    raise RanksDisagree(self._dead)
                for peer in range(self._size):
                    if is_gone(peer) and not self._store.check([keys[peer]]):
                        raise self.explain(peer, RuntimeError("its process has ended"))
                sleep(pause)
                pause = min(0.05, 2 * pause)
            return [value.decode() for value in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise self.explain(-1, error) from error
        finally:
            self.waits = None

    def fail(self, reason: str) -> RanksDisagree:
        """End the group for every rank with the first reason that any rank gave."""
        if not self._dead:
            try:
                self._dead = self._store.compare_set("verdict", "", reason).decode()
            except RuntimeError:
                self._dead = reason
            # Only now: who sees the connection close must find the reason in the store.
            self._interrupt()
        return RanksDisagree(self._dead)

    def explain(self, peer: int, error: BaseException) -> RanksDisagree:
        """What the backend's ``error`` on a message from or to ``peer`` means."""
        if isinstance(error, RanksDisagree) or self._dead:
            return self.fail(str(error))
        waiting = {self._rank: self._recent[-1] if self.waits is None else self.waits.collective}
        try:
            # A rank says why before it closes its connections. So silence means that it could not.
            if verdict := self._read("verdict"):
                return self.fail(verdict)
            ended = {rank: c for rank, c in self._cursors().items() if c.ended}
        except RuntimeError:
            return self.fail(_without_store(error, waiting[self._rank], peer))
        for rank in [peer] if peer in ended else ended:
            return self.fail(left(rank, ended[rank].ended, ended[rank].issued, waiting))
        if peer >= 0:
            return self.fail(gone(peer, waiting))
        return self.fail(f"{waiting[self._rank]} failed on rank {self._rank}: {error}")

    def leave(self, how: str, linger: float = 0.0) -> None:
        """Tell the others how this rank ends; stay up to ``linger`` seconds until all have left."""
        self._stop.set()
        self._thread.join()
        self._dead = self._dead or f"rank {self._rank}'s end of this group is closed ({how})."
        try:
            self._publish(ended=how)
            until = monotonic() + linger
            while monotonic() < until and not self._all_ended():
                sleep(0.02)
        except RuntimeError:
            log.debug("the store went before rank %d left", self._rank)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        look, say = 0.0, SAY
        watched: Wait | None = None
        while not self._stop.wait(TICK):
            waits = self.waits
            if waits is None or self._dead or waits.over():
                continue
            if watched is None or waits.since != watched.since:  # a comm that polls makes many
                watched, look = waits, PATIENCE
                say = SAY if waits.collective.seq >= 0 else SAY_AT_START
            age = monotonic() - waits.since
            if age < look:
                continue
            reason, text = self._look(waits, age)
            if reason:
                self.fail(reason)
            elif text and age >= say:
                log.warning("%s", text)
            while say <= age:
                say *= 2
            look = min(say, age + min(SLOWEST, age / 4))

    def _look(self, waits: Wait, age: float) -> tuple[str, str]:
        """Why the wait can never end (or ``""``), and what ``slow`` says of it."""
        collective = waits.collective
        try:
            self._publish(waits=collective.seq)
            cursors = self._cursors()
            reason = self._read("verdict") or decide(cursors)
        except RuntimeError as error:
            return _without_store(error, collective, waits.peer), ""
        missing = [waits.peer] if waits.peer >= 0 else absent(cursors, self._size, collective)
        if not reason and age > self._timeout:
            reason = late(missing, age, {self._rank: collective})
        return reason, slow(self._rank, cursors, missing, age, collective)

    # --- the store -------------------------------------------------------------------------

    def _publish(self, waits: int = -1, ended: str = "") -> None:
        cursor = {
            "issued": self._issued,
            "recent": self._recent.copy(),
            "waits": waits,
            "ended": ended,
        }
        self._store.set(f"cursor/{self._rank}", json.dumps(cursor, default=list))

    def _cursors(self) -> dict[int, Cursor]:
        """The cursors of the ranks that have ever waited long, or left."""
        keys = {rank: f"cursor/{rank}" for rank in range(self._size)}
        written = [rank for rank, key in keys.items() if self._store.check([key])]
        values = self._store.multi_get([keys[rank] for rank in written])
        return {rank: _cursor(value) for rank, value in zip(written, values, strict=True)}

    def _all_ended(self) -> bool:
        cursors = self._cursors()
        return len(cursors) == self._size and all(c.ended for c in cursors.values())

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def how_this_process_ends() -> str:
    """For use at interpreter exit."""
    error: BaseException | None = getattr(sys, "last_value", None)  # set if nobody caught it
    return f"it raised {error!r}" if error else "its process ended normally"


def _cursor(value: bytes) -> Cursor:
    cursor = json.loads(value)
    recent = tuple(Collective(*fields) for fields in cursor["recent"])
    return Cursor(cursor["issued"], recent, cursor["waits"], cursor["ended"])


def _without_store(error: BaseException, collective: Collective, peer: int) -> str:
    who = f"rank {peer} is gone, and " if peer >= 0 else ""
    return (
        f"{who}the store through which the ranks meet does not answer any more ({error}) while "
        f"this rank waits at {collective.in_full}. The process that served it, rank 0 or the "
        "launcher, has ended. This group cannot be used any more. Read that process's own "
        "output, then start again."
    )
