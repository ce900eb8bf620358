"""One worker's link to the others: who leads, whose parts have come, and the means.

One worker leads. It takes everybody's parts, forms the means and sends them back, so all workers
apply the same updates in the same order; its own state is the one that counts. Any other is a
follower with one connection. When the leader is lost, the first worker that can be reached leads.

    worker 1 ── part ──▶          ┌── mean ──▶ worker 1
    worker 2 ── part ──▶ worker 0 ┤
    itself   ── part ──▶          └── mean ──▶ worker 2

Rank 0 of a worker has it: its training thread calls methods, and connections ``_take``, ``_lose``.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from threading import Condition, Thread
from time import monotonic, sleep

from shardwise.comm.machine import peer_connection as wire
from shardwise.comm.watchdog.waited import Waited
from shardwise.errors import ConfigError, RanksDisagree
from shardwise.outer.peer import Joining, Peer
from shardwise.outer.place import Place
from shardwise.outer.tally import Key, Tally

POLL_INTERVAL = 0.2  # seconds between two looks for a leader
SEARCH_INTERVAL = 5.0  # seconds between a leader's looks for another one

log = logging.getLogger("shardwise")

FormMean = Callable[[Key, Sequence[bytes]], bytes]


class Link:
    """See above. Final.

    Args:
        facts: what must be alike on all workers: name → short text.
        nbytes: unit → bytes of a part or mean.
        form_mean: called by the leader with the parts of a mean.

    Raises:
        ConfigError: this worker cannot listen at its address.
    """

    def __init__(
        self, place: Place, facts: Mapping[str, str], nbytes: Mapping[str, int], form_mean: FormMean
    ) -> None:
        self._place, self._facts, self._form_mean = place, dict(facts), form_mean
        self._nbytes_of_part = dict(nbytes)
        self._changed = Condition()  # guards all that follows
        self._tally = Tally(place.worker)
        self._peers: set[Peer] = set()  # all connections, until they have ended
        self._followers: dict[int, Peer] = {}
        self._leader: Peer | None = None
        self._leads, self._begun, self._closed = False, False, False
        self._joining: list[Joining] = []
        self._ready: list[Peer] = []  # those that have the state, and wait for the next exchange
        self._answered: dict[int, float] = {}  # worker → when it answered last
        self._settled: set[int] = set()  # followers that have the state, or are sent it
        self._inbox: list[wire.Message] = []  # from the leader, while this worker joins it
        self._own: dict[Key, bytes] = {}  # sent, and without a mean yet
        self._means: dict[Key, wire.Message] = {}  # until this worker takes them
        self._present = [place.worker]  # as the leader has said
        self._counts = {"sent": 0, "received": 0}  # bytes, of connections that have ended
        self._listener = place.listen()
        Thread(target=self._accept, name="shardwise-workers", daemon=True).start()

    # ---- exchange ----------------------------------------------------------------------------

    def send(self, key: Key, part: bytes) -> None:
        """Send this worker's part of a mean."""
        with self._changed:
            self._own[key] = part
            self._pass_on(key, part)

    def receive(self, key: Key) -> bytes | None:
        """Wait for a mean; ``None``: the leader is lost, or another one is to be followed."""
        self._wait(lambda: key in self._means or not self.connected, lambda: self._awaited(key))
        with self._changed:
            if mean := self._means.pop(key, None):
                self._own.pop(key, None)
            return bytes(mean.payload) if mean else None

    def unclaimed(self, updates: Mapping[str, int]) -> list[str]:
        """The units of whose next update the mean is there, and this worker has sent no part."""
        with self._changed:
            keys = [Key(unit, update) for unit, update in updates.items()]
            return [k.unit for k in keys if k in self._means and k not in self._own]

    @property
    def connected(self) -> bool:
        """Does this worker lead, or follow one that answers?"""
        return self._leads or self._leader is not None

    @property
    def present(self) -> list[int]:
        """The workers that took part in the last mean, or do so now if this one leads."""
        with self._changed:
            return sorted(self._tally.present) if self._leads else self._present

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of parts, means and states, sent and received."""
        with self._changed:
            return {
                "sent": self._counts["sent"] + sum(peer.sent for peer in self._peers),
                "received": self._counts["received"] + sum(peer.received for peer in self._peers),
            }

    # ---- meet --------------------------------------------------------------------------------

    def find(self, digest: str, first: bool) -> str:
        """Find the leader, or lead; returns ``"lead"``, ``"follow"``, or ``"leave"``: neither.

        Args:
            digest: of this worker's state.
            first: before one leads without the rest wait for ``timeout``, unless others have begun.

        Raises:
            RanksDisagree: the leader refuses this worker.
        """
        waited, self._begun = Waited(), not first
        while not self._closed:
            answers = {w: answer for w in self._place.others if (answer := self._place.ask(w))}
            self._answered |= dict.fromkeys(answers, monotonic())
            leader = next((w for w, answer in answers.items() if answer["leads"]), None)
            if leader is not None and self._follow(leader, digest):
                return "follow"
            missing = [w for w in self._place.others if w not in answers]
            begun = self._begun or any(answer["begun"] for answer in answers.values())
            late = begun or waited.seconds > self._place.timeout
            is_first = all(not self._yields_to(w, a["updates"]) for w, a in answers.items())
            if leader is None and is_first and (late or not missing):
                self._lead()
                return "lead"
            absent = "; ".join(f"{self._place.name(w)} is not there" for w in missing)
            self._say_or_close(waited, absent)
            with self._changed:
                self._changed.wait(POLL_INTERVAL)
        return "leave"

    def _lead(self) -> None:
        with self._changed:
            # A mean that has come, and is not applied yet, is the one that others apply.
            self._leads, self._tally = True, Tally(self._place.worker, self._means)
        Thread(target=self._search, name="shardwise-leader", daemon=True).start()

    def next_message(self) -> wire.Message:
        """The leader's next word to this worker, which joins it; ``lost``: it is lost meanwhile.

        Raises ``RanksDisagree``: the leader refuses it.
        """
        self._wait(lambda: bool(self._inbox) or not self.connected, lambda: "the leader's state")
        with self._changed:
            if not self._inbox:
                return wire.Message("lost", {})
            message = self._inbox.pop(0)
            if (unit := message.fields.get("unit")) is not None:  # what it sent before is nothing
                self._own = {key: part for key, part in self._own.items() if key.unit != unit}
        if message.kind == "refused":
            raise RanksDisagree(message.fields["reason"])
        return message

    def ready(self) -> None:
        """This worker has the leader's state, and sends it what has no mean yet."""
        with self._changed:
            for key, part in self._own.items():  # first: means are formed when all are ready
                self._pass_on(key, part)
            if self._leader is not None:
                self._leader.send(wire.Message("ready", {}))

    def joining(self, step: int, expected: bool) -> Joining | None:
        """Start workers that are ready, and return one that waits to be admitted.

        Args:
            step: local steps taken: workers that are ready go on from there.
            expected: wait until each worker that can be reached takes part.
        """
        waited = Waited()
        while expected and self._leads and not self._joining and (missing := self._unsettled()):
            with self._changed:
                self._changed.wait(POLL_INTERVAL)
            self._say_or_close(waited, f"workers {sorted(missing)} are there and do not join")
        with self._changed:
            if self._joining:
                return self._joining[0]
            if not self._leads:
                return None
            for key, part in self._own.items():  # it may have sent them to a leader before
                self._tally.add(self._place.worker, key, part)
            for peer in self._ready:  # at once: who goes first could form a mean without the rest
                self._tally.present.add(peer.worker)
                peer.send(wire.Message("go", {"step": step}))
            self._ready.clear()
            self._form()
            return None

    def _unsettled(self) -> set[int]:
        """The workers that have answered lately, and have yet to join."""
        for worker in set(self._place.others) - self._settled:
            if self._place.ask(worker):
                self._answered[worker] = monotonic()
        oldest = monotonic() - self._place.patience
        with self._changed:
            return {w for w, at in self._answered.items() if at > oldest} - self._settled

    def admit(self, joining: Joining, state: Sequence[wire.Message]) -> None:
        """Send a worker the state, if it needs it; from now on it gets every mean."""
        peer = joining.peer
        with self._changed:
            if waits := joining in self._joining:  # not lost meanwhile, nor sent away by ``leave``
                self._joining.remove(joining)
                # Means that are formed and not applied yet are newer than the state.
                for message in (*state, wire.Message("welcome", {}), *self._means.values()):
                    peer.send(message)
                self._followers[peer.worker] = peer
                if state:
                    self._settled.add(peer.worker)
        if waits:
            log.warning("%s takes part", self._place.name(peer.worker))

    def leave(self) -> None:
        """End a lead or what this worker follows: the others look for each other."""
        with self._changed:
            peers = list(self._peers)
            self._leads, self._leader = False, None
            self._followers, self._settled, self._joining, self._ready = {}, set(), [], []
        for peer in peers:
            peer.close()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.leave()

    # ---- called by threads of connections -------------------------------------------------------

    def _take(self, peer: Peer, message: wire.Message) -> None:
        with self._changed:
            if peer not in (self._leader, self._followers.get(peer.worker)):  # since ``leave``
                return
            if message.kind in ("part", "mean"):
                key = Key(message.fields["unit"], message.fields["update"])
                if len(message.payload) != (nbytes := self._nbytes_of_part[key.unit]):
                    raise ValueError(f"{len(message.payload)} bytes of {key}, not {nbytes}")
                if message.kind == "mean":
                    self._means[key] = message
                    self._present = message.fields["workers"]
                else:
                    self._tally.add(peer.worker, key, bytes(message.payload))
                    self._form()
            elif message.kind == "ready":
                self._ready.append(peer)
                self._settled.add(peer.worker)
            else:
                self._inbox.append(message)
            self._changed.notify_all()

    def _lose(self, peer: Peer, reason: str) -> None:
        with self._changed:
            self._peers.discard(peer)
            self._counts["sent"] += peer.written
            self._counts["received"] += peer.received
            self._joining = [joining for joining in self._joining if joining.peer is not peer]
            self._answered.pop(peer.worker, None)
            self._ready = [ready for ready in self._ready if ready is not peer]
            is_leader, is_follower = self._leader is peer, self._followers.get(peer.worker) is peer
            if is_leader:
                self._leader = None
            if is_follower:
                del self._followers[peer.worker]
                self._settled.discard(peer.worker)
                self._tally.drop(peer.worker)
                self._form()
            self._changed.notify_all()
            goes_on = "another worker leads next" if is_leader else f"workers {self.present} go on"
        if (is_leader or is_follower) and not self._closed:
            log.warning("%s is lost: %s; %s", self._place.name(peer.worker), reason, goes_on)

    def _pass_on(self, key: Key, part: bytes) -> None:
        if self._leads:
            self._tally.add(self._place.worker, key, part)
            self._form()
        elif self._leader is not None:
            self._leader.send(wire.Message("part", key._asdict(), part))

    def _form(self) -> None:
        """Form the means that are due, and send them."""
        for key, parts in self._tally.take():
            fields = {**key._asdict(), "workers": sorted(self._tally.present)}
            self._means[key] = mean = wire.Message("mean", fields, self._form_mean(key, parts))
            for peer in self._followers.values():
                peer.send(mean)
        self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                Thread(None, self._answer, "shardwise-worker", (client,), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or there is no descriptor or thread for it
                sleep(POLL_INTERVAL)

    def _answer(self, client: socket.socket) -> None:
        """Answer a worker that asks who leads, or that joins."""
        with suppress(OSError, EOFError, ValueError, KeyError, AuthenticationError):
            connection = wire.accept(client, self._place.token, self._place.patience)
            message = wire.receive(connection)
            if message.kind == "who":
                updates = self._place.updates()
                answer = {"leads": self._leads, "begun": self._begun, "updates": updates}
                wire.send(connection, wire.Message("answer", answer))
                connection.close()
                return
            worker = int(message.fields["worker"])
            facts = message.fields["facts"]
            with self._changed:  # it may have lost this leader, which has yet to hear of it
                is_there = not self._changed.wait_for(
                    lambda: worker not in self._followers, self._place.patience / 2
                )
                if reason := self._place.refusal(worker, is_there, self._facts, facts):
                    self._answered.pop(worker, None)
            if reason:
                wire.send(connection, wire.Message("refused", {"reason": reason}))
                connection.close()
                return
            peer = Peer(connection, worker, self._place.patience, self._take, self._lose)
            with self._changed:
                if not self._leads or self._closed:  # any more
                    connection.close()
                    return
                self._peers.add(peer)
                peer.start()  # before anybody may close it
                self._joining.append(Joining(peer, message.fields["digest"]))
                self._changed.notify_all()

    # ---- other workers ---------------------------------------------------------------------------

    def _follow(self, worker: int, digest: str) -> bool:
        """Ask the leader to take part; returns whether it could be reached."""
        try:
            connection = self._place.connect(worker)
            fields = {"worker": self._place.worker, "digest": digest, "facts": self._facts}
            wire.send(connection, wire.Message("join", fields))
        except (OSError, EOFError):
            return False
        peer = Peer(connection, worker, self._place.patience, self._take, self._lose)
        with self._changed:
            self._inbox.clear()
            self._means.clear()
            self._leader = peer
            self._peers.add(peer)
            peer.start()
        return True

    def _search(self) -> None:
        """While this worker leads: where a cut link comes back, another one may lead as well."""
        while not self._closed and self._leads:
            for worker in self._place.others:
                with suppress(ConfigError):
                    answer = None if worker in self._followers else self._place.ask(worker)
                    if answer and answer["leads"] and self._yields_to(worker, answer["updates"]):
                        log.warning("%s leads, too, and has come further", self._place.name(worker))
                        self.leave()
                        return  # this worker may lead or follow again at once
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._leads, SEARCH_INTERVAL)

    def _yields_to(self, worker: int, updates: int) -> bool:
        return (updates, -worker) > (self._place.updates(), -self._place.worker)

    # ---- waiting ---------------------------------------------------------------------------------

    def _wait(self, is_there: Callable[[], bool], what: Callable[[], str]) -> None:
        waited = Waited()
        with self._changed:
            while not (self._changed.wait_for(is_there, POLL_INTERVAL) or self._closed):
                self._say_or_close(waited, what())

    def _say_or_close(self, waited: Waited, what: str) -> None:
        """Say what this worker waits for, or end that and all connections where it is to stop."""
        if self._place.stops():
            self.close()
        self._place.say(waited, what)

    def _awaited(self, key: Key) -> str:
        if self._leads:
            names = ", ".join(self._place.name(worker) for worker in self._tally.missing(key))
            return f"{names} has not sent its part of {key}"
        leader = self._leader
        return f"the mean of {key} from {self._place.name(leader.worker)}" if leader else ""
