"""Ranks that meet, and what one reads that waits for others: who is missing, and why."""

from __future__ import annotations

import errno
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardwise.comm.machine import meeting as meeting_module
from shardwise.comm.machine.environment import Launch
from shardwise.comm.machine.meeting import Meeting
from shardwise.comm.machine.run_token import derived
from shardwise.comm.watchdog import heartbeat
from shardwise.comm.watchdog.waits_in_cpp import WaitsInCpp
from shardwise.errors import ConfigError, RanksDisagree
from tests.forked import forked
from tests.ranks import free_port
from tests.waiting import wait_for


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(heartbeat, "FIRST_WARNING", 0.1)
    monkeypatch.setattr(meeting_module, "LINGER", 0.0)
    monkeypatch.setattr(meeting_module, "_meetings", iter([7] * 9))  # each "process" has its first
    return free_port()


def rank(
    number: int,
    port: int,
    *,
    size: int = 2,
    host: str = "127.0.0.1",
    timeout: float = 60.0,
    attempt: str = "",
) -> Meeting:
    """A meeting of one rank; with an ``attempt``, the launcher serves the store."""
    launch = Launch(number, size, number, host, port)
    serves = number == 0 and not attempt
    return Meeting(launch, serves=serves, timeout=timeout, attempt=attempt or "0")


def waiting(*meetings: Meeting) -> tuple[list[threading.Thread], list[str]]:
    """Threads in which these wait, and what each raised in the end."""
    raised: list[str] = []

    def wait(meeting: Meeting) -> None:
        try:
            meeting.store()
        except Exception as error:  # noqa: BLE001 - read by the test
            raised.append(str(error))

    threads = [threading.Thread(target=wait, args=(meeting,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    return threads, raised


def test_a_rank_says_again_and_again_who_is_missing(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RanksDisagree) as error:
        rank(0, port, size=4, timeout=0.8).store()
    expected = f"to meet the others at 127.0.0.1:{port}: ranks 1–3 are not there"
    assert len(caplog.messages) >= 3
    assert all(message.startswith("rank 0 has waited 0 s to") for message in caplog.messages[:2])
    assert all(message.endswith(expected) for message in caplog.messages)
    assert str(error.value).startswith(
        f"the ranks did not all connect to 127.0.0.1:{port} within 1 s: ranks 1–3 are not there. "
        "Nothing has started. Check that every rank was started with the same MASTER_ADDR"
    )


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        ("127.0.0.1", "of 127.0.0.1, where rank 0 serves the store"),
        ("nowhere.invalid", "the name nowhere.invalid does not resolve on "),
    ],
)
def test_a_rank_without_a_rank_0_says_why_and_torch_prints_no_frames(
    port: int,
    host: str,
    cause: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RanksDisagree, match=cause):
        rank(1, port, host=host, timeout=0.8).store()
    assert cause in caplog.messages[0]
    assert capfd.readouterr().err == ""


def test_two_processes_of_one_rank_are_named_on_every_rank(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rank(0, port, size=3), rank(1, port, size=3)
    threads, raised = waiting(*first)
    wait_for(lambda: "rank 2 is not there" in caplog.text)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: 17)
    second = rank(1, port, size=3)
    with pytest.raises(ConfigError) as error:
        second.store()
    second.fail(error.value)
    for thread in threads:
        thread.join()
    host = platform.node()
    named = f"two processes are rank 1 of 3: process {process} on {host}, and process 17 on {host}."
    assert str(error.value).startswith(named)
    assert [text.startswith(f"rank 1 could not connect: {named}") for text in raised] == [True] * 2


def test_ranks_meet_though_their_hosts_have_restarted_them_unequally_often(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As under torchrun's static rendezvous, whose store outlives the ranks."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    before = rank(0, port, attempt="0"), rank(1, port, attempt="0")
    threads, raised = waiting(*before)
    for thread in threads:
        thread.join()
    assert before[0].failure() == ""
    with pytest.raises(RanksDisagree, match="rank 0 is not there"):
        rank(1, port, attempt="1", timeout=0.3).store()  # it is started again, and again
    assert "was started again after all had met" in before[0].failure()
    threads, raised = waiting(rank(1, port, attempt="2"))
    wait_for(lambda: len(caplog.messages) >= 4)
    others, more = waiting(rank(0, port, attempt="1"))
    for thread in [*threads, *others]:
        thread.join()
    assert raised + more == []
    del store


def test_a_process_with_another_run_token_is_refused_and_named(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "a secret")
    threads, raised = waiting(rank(0, port))
    wait_for(lambda: caplog.messages)
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "another")
    foreign, name = rank(1, port, timeout=5), f"process {os.getpid()} on {platform.node()}"
    with pytest.raises(ConfigError, match="is not let in as rank 1: its run token is another one"):
        foreign.store()
    message = (
        f"rank 1 is not there; {name} says that it is rank 1, with another SHARDWISE_RUN_TOKEN"
    )
    wait_for(lambda: message in caplog.messages[-1])
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "a secret")
    assert rank(1, port).store() is not None
    threads[0].join()
    assert raised == []


def test_without_the_token_nothing_of_the_run_can_be_named(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries have a name that only who knows the token can form."""
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "a secret")
    meeting = rank(0, port, size=1)
    meeting.store().set("key", "value")
    keys = TCPStore("127.0.0.1", port, wait_for_workers=False).list_keys()
    assert f"shardwise/{derived('a secret', 'meeting')}/7/0/group/key" in [
        key.replace("//", "/") for key in keys
    ]
    assert "secret" not in "".join(keys)


def test_ranks_of_another_world_size_are_told(port: int) -> None:
    first = rank(0, port, size=3, timeout=2)
    threads, _ = waiting(first)
    wait_for(lambda: first._store is not None and first._store.check(["size"]))
    with pytest.raises(ConfigError, match="one of 2 ranks, and a rank before it as one of 3"):
        rank(1, port, size=2).store()
    threads[0].join()


def test_a_store_that_ends_while_ranks_arrive_is_a_sentence(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object) -> bool:
        raise RuntimeError("Connection was likely closed")

    monkeypatch.setattr(PrefixStore, "check", check)
    with pytest.raises(RanksDisagree, match="does not answer any more"):
        rank(0, port).store()


def test_the_error_of_one_rank_ends_the_waits_of_all(port: int) -> None:
    """Those that are to come read it, too."""
    meetings = [rank(number, port) for number in range(2)]
    threads, raised = waiting(*meetings)
    for thread in threads:
        thread.join()
    assert raised == []
    meetings[1].fail(OSError(errno.EMFILE, "Too many open files"))
    with pytest.raises(RanksDisagree, match=r"^rank 1 could not connect: OSError\(24, 'Too many"):
        meetings[0].run(lambda: time.sleep(60))
    assert meetings[0].failure().startswith("rank 1 could not connect")


def test_a_process_that_can_open_no_socket_says_so_at_once(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(OSError, match="Too many open files"):
        rank(1, port).store()


def test_another_program_at_the_port_is_not_taken_for_the_store(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RanksDisagree):
        rank(0, port, timeout=0.8).store()
    message = "a launcher that starts, or a program, has not answered as a store of torch does"
    assert caplog.messages[0].endswith(message)


def test_a_slow_store_is_not_taken_for_another_program(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(*given: Any, **options: Any) -> TCPStore:
        store = TCPStore(*given, **options)
        wait_for(lambda: caplog.messages)
        return store

    monkeypatch.setattr(meeting_module, "TCPStore", slow)
    rank(0, port, size=1).store()
    expected = "the store of this rank has not answered as a store of torch does"
    assert [message.endswith(expected) for message in caplog.messages] == [True]


def test_a_call_that_nothing_can_end_is_watched(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A vendor's backend connects on the thread that has the device."""

    def call() -> int:
        wait_for(lambda: caplog.messages)
        return threading.get_ident()

    assert rank(0, port).watch(call) == threading.get_ident()
    assert caplog.messages[0].endswith(f"at 127.0.0.1:{port}: not all connections are made")


def test_what_fails_in_torch_is_no_crash(port: int) -> None:
    def fail() -> None:
        raise DistError("connection reset")

    with pytest.raises(RanksDisagree, match=r"cannot connect \(connection reset\)\. Nothing has"):
        rank(0, port).run(fail)


def test_a_call_in_torch_ends_when_the_check_raises() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WaitsInCpp().carry_out(lambda: time.sleep(60), check)
    assert WaitsInCpp().carry_out(lambda: 3, check) == 3


MEETS = """
from shardwise.comm.watchdog import heartbeat
heartbeat.FIRST_WARNING = 0.1
import shardwise as sw
sw.connect("cpu")
"""


def two_of_three() -> list[subprocess.Popen[str]]:
    """Rank 0, which serves the store, and rank 1, which wait for rank 2."""
    at = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETS],
            env=os.environ | at | {"RANK": str(number), "LOCAL_RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in ranks:
        assert process.stderr is not None
        while "rank 2 is not there" not in process.stderr.readline():
            assert process.poll() is None
    return ranks


@forked
def test_a_signal_ends_ranks_that_wait_for_one_that_never_comes() -> None:
    ranks = two_of_three()
    for process in ranks:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(5) for process in ranks] == [-signal.SIGTERM] * 2
    for process in ranks:
        process.communicate()


@forked
def test_a_rank_that_is_killed_ends_the_waits_of_those_on_its_host() -> None:
    """Its parent has not waited for it, so it has a process number still."""
    first, second = two_of_three()
    second.kill()
    message = f"rank 1 (process {second.pid}) has ended; read its own output. Nothing has started."
    assert message in first.communicate(timeout=20)[1]
    assert first.returncode == 1
    second.communicate()


def test_a_rank_that_is_connected_may_end_before_the_others_are(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "LOOK_INTERVAL", 0.0)
    first, second = meetings = rank(0, port), rank(1, port)
    for thread in waiting(*meetings)[0]:
        thread.join()
    first.run(lambda: None)
    monkeypatch.setattr(meeting_module, "_has_ended", lambda pid: pid != "0")
    assert first.run(lambda: None) is None
    with pytest.raises(RanksDisagree, match=r"rank 1 \(process \d+\) has ended"):
        first.run(lambda: time.sleep(60))
    second.watch(lambda: None)
    assert first.run(lambda: time.sleep(0.2)) is None
