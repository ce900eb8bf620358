"""Links of workers in one process: what a broken peer does, and what a leader that leaves does."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from shardwise.comm.machine.peer_connection import Message, receive, send
from shardwise.outer.link import Link
from shardwise.outer.peer import Joining, Peer
from shardwise.outer.place import Place
from shardwise.outer.tally import Key
from tests.outer.test_diloco import free_addresses
from tests.waiting import wait_for

NBYTES = 8


@pytest.fixture(name="places")
def _places() -> list[Place]:
    return places_of(2)


def places_of(workers: int) -> list[Place]:
    pairs = (address.split(":") for address in free_addresses(workers))
    addresses = [(host, int(port)) for host, port in pairs]
    return [Place(addresses, number, b"secret", 1.0, 5.0) for number in range(workers)]


def link_of(place: Place) -> Link:
    return Link(place, {}, {"a": NBYTES}, lambda _key, parts: parts[0])


@pytest.fixture(name="leader")
def _leader(places: list[Place]) -> Iterator[Link]:
    with ExitStack() as stack:
        link = link_of(places[0])
        stack.callback(link.close)
        assert link.find("", first=False) == "lead"
        yield link


def join(place: Place) -> Connection:
    """A connection of worker 1 that has asked to take part."""
    connection = place.connect(0)
    send(connection, Message("join", {"worker": 1, "digest": "", "facts": {}}))
    return connection


def asked(leader: Link) -> Joining:
    """Who has asked to take part. A look before that would begin without it."""
    wait_for(lambda: bool(leader._joining))
    joining = leader.joining(0, expected=False)
    assert joining is not None
    return joining


def admitted(leader: Link) -> None:
    leader.admit(asked(leader), [])


def begun(leader: Link, place: Place) -> Connection:
    """Worker 1 takes part, beside the leader alone."""
    connection = join(place)
    admitted(leader)
    send(connection, Message("ready", {}))
    wait_for(lambda: leader.joining(0, expected=False) is None and leader.present == [0, 1])
    return connection


@pytest.mark.parametrize(
    "part",
    [
        Message("part", {"unit": "a", "update": 0}, b"short"),
        Message("part", {"unit": "another", "update": 0}, bytes(NBYTES)),
        Message("part", {}, bytes(NBYTES)),
        Message("part", {"unit": ["a"], "update": 0}, bytes(NBYTES)),
    ],
)
def test_a_worker_that_sends_what_no_part_is_is_lost_and_stops_nobody(
    leader: Link, places: list[Place], part: Message
) -> None:
    connection = begun(leader, places[1])
    leader.send(Key("a", 0), bytes(NBYTES))
    send(connection, part)
    assert leader.receive(Key("a", 0)) == bytes(NBYTES)
    assert leader.present == [0]
    connection.close()


def test_a_leader_without_descriptors_for_a_moment_is_reached_later(
    leader: Link, places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, threading.Event()

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    assert places[1].ask(0)  # of the accept that waits already
    failed.wait(5)
    assert places[1].ask(0)


def test_a_worker_that_joined_one_who_leads_no_more_is_sent_away(
    leader: Link, places: list[Place]
) -> None:
    connection = join(places[1])
    joining = asked(leader)
    leader.leave()
    leader.admit(joining, [])
    with pytest.raises(EOFError):
        receive(connection)
    connection.close()
    assert leader.joining(0, expected=True) is None  # it waits for nobody


def test_workers_that_meet_begin_together() -> None:
    """Else the first mean could be one without a worker that was there from the beginning."""
    leader, *others = map(link_of, places_of(3))
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for link in (leader, *others):
            stack.callback(link.close)
        assert leader.find("", first=False) == "lead"
        for link in others:
            assert link.find("", first=False) == "follow"
            joining = leader.joining(0, expected=True)
            assert joining is not None
            leader.admit(joining, [])
            assert link.next_message().kind == "welcome"
        met = pool.submit(leader.joining, 0, expected=True)
        others[0].ready()
        begun = pool.submit(others[0].next_message)
        assert not wait([begun], 0.3).done
        others[1].ready()
        assert begun.result(5).kind == others[1].next_message().kind == "go"
        assert met.result(5) is None
        assert leader.present == [0, 1, 2]


def met(leader: Link, *followers: Link) -> None:
    """All have begun."""
    assert leader.find("", first=False) == "lead"
    for link in followers:
        assert link.find("", first=False) == "follow"
        admitted(leader)
        assert link.next_message().kind == "welcome"
        link.ready()
    assert leader.joining(0, expected=True) is None


def test_who_leads_next_keeps_a_mean_that_has_come() -> None:
    """The leader had all parts, applied their mean, and left before this worker had applied it."""
    leader, follower = map(link_of, places_of(2))
    with ExitStack() as stack:
        for link in (leader, follower):
            stack.callback(link.close)
        met(leader, follower)
        follower.send(Key("a", 0), b"follower")
        leader.send(Key("a", 0), b"leader's")
        assert leader.receive(Key("a", 0)) == b"leader's"
        leader.close()
        wait_for(lambda: not follower.connected)
        assert follower.find("", first=False) == "lead"
        assert follower.joining(0, expected=False) is None
        assert follower.receive(Key("a", 0)) == b"leader's"


def test_who_leads_next_forms_the_mean_of_all_parts_that_were_sent_to_the_one_before() -> None:
    """A part crosses a slow link after the word that its worker is ready."""
    leader, *others = links = [link_of(place) for place in places_of(4)]
    counts: list[int] = []

    def form(_key: Key, parts: Sequence[bytes]) -> bytes:
        counts.append(len(parts))
        return parts[0]

    with ExitStack() as stack:
        for link in links:
            stack.callback(link.close)
            link._form_mean = form
        met(leader, *others)
        for link in others:
            link.send(Key("a", 0), bytes(NBYTES))
        leader.close()
        for link in others:
            wait_for(lambda link=link: not link.connected)  # type: ignore[misc]
        met(*others)
        for link in others:
            assert link.receive(Key("a", 0)) == bytes(NBYTES)
    assert counts == [3]


def test_a_part_that_comes_after_the_lead_has_ended_forms_no_mean(
    leader: Link, places: list[Place]
) -> None:
    """Else this worker would apply it alone, and beside the one that it follows then."""
    connection = begun(leader, places[1])
    leader.send(Key("a", 0), bytes(NBYTES))
    (follower,) = leader._followers.values()
    leaving = threading.Thread(target=leader.leave)
    leaving.start()
    wait_for(lambda: not leader.connected)
    send(connection, Message("part", {"unit": "a", "update": 0}, bytes(NBYTES)))
    connection.close()
    follower._reader.join(10)
    leaving.join(10)
    assert leader.receive(Key("a", 0)) is None


def test_a_worker_whose_leader_is_lost_before_it_is_ready_looks_for_another() -> None:
    leader, follower = map(link_of, places_of(2))
    with ExitStack() as stack:
        for link in (leader, follower):
            stack.callback(link.close)
        assert leader.find("", first=False) == "lead"
        assert follower.find("", first=False) == "follow"
        admitted(leader)
        leader.close()
        wait_for(lambda: not follower.connected)
        assert follower.next_message().kind == "welcome"
        follower.ready()
        assert follower.next_message().kind == "lost"


def test_what_was_sent_before_a_state_is_nothing_also_where_its_leader_is_lost() -> None:
    """The part is of another start. Who was sent half of the state may lead next."""
    leader, follower = map(link_of, places_of(2))
    with ExitStack() as stack:
        for link in (leader, follower):
            stack.callback(link.close)
        follower.send(Key("a", 0), b"obsolete")
        assert leader.find("", first=False) == "lead"
        assert follower.find("", first=False) == "follow"
        leader.admit(asked(leader), [Message("state", {"unit": "a", "update": 0})])
        assert follower.next_message().kind == "state"
        leader.close()
        wait_for(lambda: not follower.connected)
        assert follower.find("", first=False) == "lead"
        assert follower.joining(0, expected=False) is None
        follower.send(Key("a", 0), b"the new.")
        assert follower.receive(Key("a", 0)) == b"the new."


def test_a_worker_that_comes_back_before_its_leader_has_heard_of_the_loss_is_not_refused(
    leader: Link, places: list[Place]
) -> None:
    """A link was cut for a while: each end finds the silence at a time of its own."""
    before = join(places[1])
    admitted(leader)
    back = join(places[1])
    assert not back.poll(0.2)  # no word yet: neither taken, nor refused
    before.close()
    wait_for(lambda: bool(leader._joining))
    back.close()


def test_a_worker_that_is_lost_while_its_state_is_gathered_may_come_again(
    leader: Link, places: list[Place]
) -> None:
    """A large model's takes minutes. Who was admitted after its loss was there for ever."""
    gone = join(places[1])
    joining = asked(leader)
    gone.close()
    joining.peer._reader.join(5)
    leader.admit(joining, [])
    back = join(places[1])
    admitted(leader)
    assert receive(back).kind == "welcome"
    back.close()


def test_who_goes_on_does_not_wait_with_one_that_came_again_for_one_that_is_lost() -> None:
    """It resumes where they are, and leads as the first of them, after the loss of a leader."""
    again, goes_on = map(link_of, places_of(3)[:2])
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for link in (again, goes_on):
            stack.callback(link.close)
        roles = [pool.submit(link.find, "", link is again) for link in (again, goes_on)]
        assert [role.result(3) for role in roles] == ["lead", "follow"]


def test_bytes_of_a_connection_that_ends_count_until_it_has_ended(
    leader: Link, places: list[Place]
) -> None:
    connection = begun(leader, places[1])
    leader.send(Key("a", 0), bytes(NBYTES))
    send(connection, Message("part", {"unit": "a", "update": 0}, bytes(NBYTES)))
    assert leader.receive(Key("a", 0)) == bytes(NBYTES)
    leader.leave()
    assert leader.nbytes == {"sent": NBYTES, "received": NBYTES}
    connection.close()


def test_bytes_that_a_lost_worker_was_never_sent_count_no_more(
    leader: Link, places: list[Place]
) -> None:
    connection = join(places[1])
    leader.admit(asked(leader), [Message("state", {}, bytes(20_000_000))])
    assert leader.nbytes["sent"] == 20_000_000
    connection.close()
    wait_for(lambda: not leader._followers)
    assert leader.nbytes["sent"] == 0


def test_a_close_waits_for_the_last_mean_to_arrive() -> None:
    """The other end reads late, and the connection is closed as soon as all is handed over."""
    one, other = socket.create_server(("127.0.0.1", 0)), None
    client = socket.create_connection(one.getsockname())
    other, _ = one.accept()
    one.close()
    peer = Peer(Connection(client.detach()), 1, 2.0, lambda *_: None, lambda *_: None)
    peer.start()
    peer.send(Message("mean", {}, bytes(20_000_000)))
    closing = threading.Thread(target=peer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    connection = Connection(other.detach())
    assert len(receive(connection).payload) == 20_000_000
    closing.join(5)
    assert not closing.is_alive()
    connection.close()
