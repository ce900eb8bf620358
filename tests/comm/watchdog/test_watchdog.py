"""The watchdog of a group, between threads and over a store in memory: it needs no backend."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from shardwise.comm.watchdog import heartbeat, watchdog
from shardwise.comm.watchdog.desync import Collective
from shardwise.comm.watchdog.watchdog import Wait, Watchdog
from shardwise.errors import RanksDisagree
from tests.waiting import wait_for

A, B, C = (Collective(seq, "all_gather", "gather", f"blocks.{seq}", 1024) for seq in range(3))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 0.05)
    monkeypatch.setattr(heartbeat, "FIRST_WARNING", 0.1)
    monkeypatch.setattr(watchdog, "MAX_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)


@dataclass
class Group:
    """Watches over one store, and which of them were interrupted."""

    store: HashStore = field(default_factory=HashStore)
    watches: list[Watchdog] = field(default_factory=list)
    interrupted: list[threading.Event] = field(default_factory=list)

    def add(self, size: int, timeout: float = 60.0) -> Watchdog:
        event = threading.Event()
        rank = len(self.watches)
        self.watches.append(Watchdog(self.store, rank, size, event.set, timeout))
        self.interrupted.append(event)
        return self.watches[rank]


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    for one in group.watches:
        one.leave("the test is over")


def begin_wait(one: Watchdog, collective: Collective, peer: int | None = None) -> None:
    one.waits = Wait(collective, time.monotonic(), peer)


def reason(one: Watchdog) -> str:
    with pytest.raises(RanksDisagree) as error:
        one.issue(C)
    return str(error.value)


def test_ranks_that_wait_at_unlike_collectives_are_interrupted_with_one_reason(
    group: Group,
) -> None:
    mine, other = group.add(2), group.add(2)
    mine.issue(A)
    other.issue(A._replace(unit="blocks.9"))
    begin_wait(mine, A)
    begin_wait(other, A)
    assert all(event.wait(60) for event in group.interrupted)
    assert reason(mine) == reason(other)
    assert "rank 1 is at gather blocks.9 (1,024 bytes), rank 0 at gather blocks.0" in reason(mine)


def test_a_rank_that_waits_for_a_rank_that_computes_is_left_alone(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = group.add(2), group.add(2)
    other.issue(A)
    mine.issue(A)
    mine.issue(B)
    since = time.monotonic()
    with caplog.at_level(logging.WARNING, "shardwise"):
        begin_wait(mine, B)
        wait_for(lambda: len(caplog.messages) >= 3, 60)
    mine.waits = None
    mine.issue(C)  # raises if the group is dead
    assert not any(event.is_set() for event in group.interrupted)
    # At 0.1 s, then at twice the time and so on: 0.2, 0.4, and not a line per look.
    assert time.monotonic() - since >= 0.4
    assert caplog.messages[0].startswith(
        "rank 0 has waited 0 s for rank 1 at gather blocks.1 (coll"
    )


def test_a_log_line_names_the_peer_whose_message_is_missing(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    mine, _, _ = group.add(3), group.add(3), group.add(3)
    mine.issue(A)
    with caplog.at_level(logging.WARNING, "shardwise"):
        begin_wait(mine, A)
        wait_for(lambda: "for ranks 1 and 2 at" in caplog.text, 60)
        begin_wait(mine, A, peer=2)
        wait_for(lambda: "for rank 2 at" in caplog.text, 60)


def test_a_comm_that_notes_its_wait_at_every_poll_is_told_of_at_doubling_times(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    mine, since = group.add(2), time.monotonic()
    mine.issue(A)
    while len(caplog.messages) < 3:
        mine.waits = Wait(A, since, peer=1)
        time.sleep(0.002)
    mine.waits = None
    assert time.monotonic() - since >= 0.4  # 0.1, 0.2, 0.4 s, and not at every look


def test_a_rank_publishes_its_last_256_collectives(group: Group) -> None:
    mine = group.add(2)
    for seq in range(300):
        mine.issue(A._replace(seq=seq))
    mine._publish()
    assert [c.seq for c in mine._read_progress()[0].recent] == [*range(44, 300)]


def test_nothing_but_heartbeats_is_written_while_nobody_waits_long(group: Group) -> None:
    mine, other = group.add(2), group.add(2)
    for one in (mine, other):
        one.issue(A)
        begin_wait(one, A)
        one.waits = None
    wait_for(lambda: group.store.check(["alive/0", "alive/1"]), 60)
    assert group.store.num_keys() == 2


def test_a_rank_that_sends_heartbeats_and_does_not_come_is_named_with_its_stack(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = group.add(2), group.add(2)
    other.issue(A)
    mine.issue(A)
    mine.issue(B)
    begin_wait(mine, B)
    wait_for(lambda: "stack of ranks 0 and 1" in caplog.text, 60)
    assert "rank 1 runs: process " in caplog.text
    assert "last issued gather blocks.0" in caplog.text
    assert "test_watchdog.py:" in caplog.text


def test_a_rank_whose_heartbeats_stop_is_named_with_its_last_one(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = group.add(2), group.add(2)
    other.issue(A)
    wait_for(lambda: "last issued gather" in group.store.get("alive/1").decode(), 60)
    other._stop.set()  # as a signal would stop it
    mine.issue(A)
    mine.issue(B)
    begin_wait(mine, B)
    wait_for(lambda: "rank 1 has sent no heartbeat for " in caplog.text, 60)
    last = caplog.text.partition("The last one: ")[2]
    assert last.startswith("process ")
    assert "last issued gather blocks.0" in last
    assert not any(event.is_set() for event in group.interrupted)


@pytest.mark.parametrize("count", [1, 2])
def test_a_rank_in_a_collective_of_torch_is_not_waited_for_if_it_came_to_it_before(
    group: Group, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """``state_dict()`` on rank 0 alone, while the others wait at a barrier; or after the gather."""
    mine = group.add(2)
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(group.add, 2).result()
        monkeypatch.setattr(watchdog, "joint_call", lambda thread: thread == peer._caller)
        for collective in [A, B][:count]:
            peer.issue(collective)
        mine.issue(A)
        mine.issue(B)
        begin_wait(mine, B)
        if count == 2:
            time.sleep(0.5)
            mine.raise_if_failed()
            return
        wait_for(lambda: bool(mine.failure), 60)
    assert "rank 1 has left (it called a collective of torch that ends when all" in mine.failure
    assert "rank 0 waits at gather blocks.1" in mine.failure


def test_the_lowest_waiting_rank_that_is_not_frozen_reports(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    watches = [group.add(3) for _ in range(3)]
    for one in watches[:2]:
        one.issue(A)
        begin_wait(one, A)
    wait_for(lambda: "have waited" in caplog.text, 60)
    watches[0]._stop.set()
    wait_for(lambda: "rank 1 has waited" in caplog.text, 60)


def test_work_that_is_over_is_not_waited_for(group: Group) -> None:
    mine = group.add(2, timeout=0.1)
    mine.issue(A)
    mine.waits = Wait(A, time.monotonic() - 100, is_complete=lambda: True)
    time.sleep(0.3)
    mine.issue(B)  # raises if the group is dead


def test_a_device_waits_from_when_it_has_ended_what_came_before(group: Group) -> None:
    """The host issues a whole step ahead of it."""
    mine = group.add(2)
    mine.leave("the test looks itself")
    ended, long_ago = list[Collective](), time.monotonic() - 100
    for collective in (A, B):
        one = Wait(collective, long_ago, is_complete=partial(ended.__contains__, collective))
        mine.on_device.append(one)
    assert mine._present() == mine.on_device[0]
    ended.append(A)
    present = mine._present()
    assert present is not None
    assert present.collective == B
    assert time.monotonic() - present.since < 50
    ended.append(B)
    assert mine._present() is None


def test_a_call_that_never_returns_is_a_wait(group: Group) -> None:
    mine = group.add(2)
    with mine.calling(A):
        present = mine._present()
        assert present is not None
        assert present.collective == A
    assert mine._present() is None


def test_the_time_limit_names_who_never_came(group: Group) -> None:
    mine, other = group.add(3, timeout=0.3), group.add(3)
    group.add(3)
    mine.issue(A)
    other.issue(A)
    begin_wait(other, A)
    begin_wait(mine, A)
    assert group.interrupted[0].wait(60)
    assert "rank 2 has not come within 0 s while rank 0 waits at gather blocks.0" in reason(mine)
    # The other rank that waits reads the verdict rather than find one of its own.
    assert group.interrupted[1].wait(60)
    assert reason(other) == reason(mine)


def test_a_rank_that_left_is_named_with_its_reason(group: Group) -> None:
    mine, other = group.add(2), group.add(2)
    mine.issue(A)
    other.issue(A)
    other.leave("it raised KeyError('x')")
    mine.issue(B)
    begin_wait(mine, B)
    assert group.interrupted[0].wait(60)
    assert "rank 1 has left (it raised KeyError('x') after 1 collectives) while" in reason(mine)


def test_texts_are_shared_by_rank(group: Group) -> None:
    watches, texts = [group.add(3) for _ in range(3)], ["from 0", "from 1", "from 2"]
    with ThreadPoolExecutor(3) as pool:
        shared = pool.map(lambda one, text: one.gather_texts(A, text), watches, texts)
    assert list(shared) == [texts] * 3
    assert [(one.waits, one._issued) for one in watches] == [(None, 1)] * 3


def test_who_shares_a_text_meets_its_peers_when_it_is_in_the_store(group: Group) -> None:
    mine = group.add(1)
    came: list[bool] = []
    assert mine.gather_texts(A, "a", lambda: came.append(group.store.check(["texts/0/0"]))) == ["a"]
    assert came == [True]


def test_sharing_with_a_rank_that_never_comes_ends_at_the_time_limit(group: Group) -> None:
    mine = group.add(2, timeout=0.2)
    with pytest.raises(RanksDisagree, match="rank 1 has not come within 0 s while rank 0 waits"):
        mine.gather_texts(A, "here")


def test_a_backend_s_error_is_explained_by_what_the_peer_said_last(group: Group) -> None:
    closed = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    mine, other, third = (group.add(3) for _ in range(3))
    for one in (mine, other, third):
        one.issue(A)
    begin_wait(mine, A, peer=1)
    assert str(mine.explain(closed, 1)).startswith("rank 1 ended without a reason")
    # Whoever sees the first rank close finds its verdict, and blames nobody else.
    assert str(third.explain(closed, 0)) == reason(mine)


def test_an_orderly_end_is_not_taken_for_a_crash(group: Group) -> None:
    mine, other = group.add(2), group.add(2)
    mine.issue(A)
    other.leave("its process ended normally")
    text = str(mine.explain(RuntimeError("Connection closed by peer"), 1))
    assert text.startswith("rank 1 has left (its process ended normally after 0 collectives)")


def test_of_several_ranks_that_ended_the_one_that_the_backend_missed_is_named(group: Group) -> None:
    mine, other, third = (group.add(3) for _ in range(3))
    mine.issue(A)
    other.leave("it raised KeyError('x')")
    third.leave("its process ended normally")
    text = str(mine.explain(RuntimeError("Connection closed by peer"), 2))
    assert text.startswith("rank 2 has left (its process ended normally after 0 collectives)")


def test_an_error_without_a_peer_keeps_the_backend_s_words(group: Group) -> None:
    mine = group.add(2)
    mine.issue(A)
    text = str(mine.explain(RuntimeError("unhandled system error")))
    assert text == "gather blocks.0 failed on rank 0: unhandled system error"


def test_a_store_that_is_gone_is_said_to_be_gone() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # torch by itself would listen on every interface
        port = listener.getsockname()[1]
        server = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    interrupted = threading.Event()
    mine = Watchdog(TCPStore("127.0.0.1", port), 0, 2, interrupted.set, 60.0)
    beside = Watchdog(TCPStore("127.0.0.1", port), 0, 2, interrupted.set, 60.0)
    mine.issue(A)
    beside.issue(A)
    del server
    text = str(beside.explain(RuntimeError("Connection closed by peer"), 1))
    assert text.startswith("rank 1 is gone, and the store of the ranks does not answer any more")
    interrupted.clear()
    begin_wait(mine, A, peer=1)
    assert interrupted.wait(60)
    text = reason(mine)
    assert text.startswith("rank 1 is gone, and the store of the ranks does not")
    assert "The process that served it, rank 0 or the launcher, has ended or is frozen." in text
    mine.leave("the test is over")
    beside.leave("the test is over")


def test_who_serves_the_store_lingers_until_all_have_left(group: Group) -> None:
    mine, other = group.add(2), group.add(2)
    later = threading.Timer(0.3, other.leave, ["it closed its communicator"])
    start = time.monotonic()
    later.start()
    mine.leave("it closed its communicator", linger=100)
    assert 0.25 < time.monotonic() - start < 60


def test_who_serves_the_store_does_not_linger_for_a_rank_that_was_killed(group: Group) -> None:
    mine, other = group.add(3), group.add(3)
    other.issue(A)
    other.explain(RuntimeError("Connection closed by peer"), 2)
    other.leave("it raised an error")
    start = time.monotonic()
    mine.leave("it raised an error", linger=20)
    assert time.monotonic() - start < 10


def test_a_closed_end_says_that_it_is_closed(group: Group) -> None:
    mine = group.add(2)
    mine.leave("it closed its communicator")
    assert reason(mine) == "rank 0 has left this process group (it closed its communicator)."


def test_greetings_are_exchanged_one_after_the_other(group: Group) -> None:
    one, two = group.add(2), group.add(2)
    with ThreadPoolExecutor() as pool:
        others = pool.submit(lambda: [two.greet("start", "c"), two.greet("self-test", "d")])
        assert [one.greet("start", "a"), one.greet("self-test", "b")] == [["a", "c"], ["b", "d"]]
        assert others.result() == [["a", "c"], ["b", "d"]]


def test_a_rank_whose_process_has_ended_is_not_waited_for(group: Group) -> None:
    one = group.add(2)
    with pytest.raises(RanksDisagree, match="rank 1 ended without a reason"):
        one.gather_texts(A, "a", is_gone=lambda peer: peer == 1)


def test_what_a_process_ends_with_is_the_error_that_nobody_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert watchdog.process_exit_reason() == "its process ended normally"
    monkeypatch.setattr(sys, "last_value", KeyError("x"), raising=False)
    assert watchdog.process_exit_reason() == "it raised KeyError('x')"
