"""Calls that wait in C++: one that raises, and a store whose server is frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.watchdog import heartbeat, waits_in_cpp, watchdog
from shardwise.comm.watchdog.waits_in_cpp import WaitsInCpp
from shardwise.comm.watchdog.watchdog import Watchdog
from shardwise.errors import RanksDisagree
from tests.comm.watchdog.test_watchdog import A, begin_wait
from tests.waiting import wait_for


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    waits = WaitsInCpp()
    with pytest.raises(ZeroDivisionError):
        waits.carry_out(lambda: 1 // 0, lambda: None)
    assert waits.carry_out(lambda: 7, lambda: None) == 7
    waits.close()


def test_the_check_may_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_in_cpp, "GLANCE", 0.01)
    waits, goes_on = WaitsInCpp(), threading.Event()

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waits.carry_out(lambda: goes_on.wait(60), check)
    goes_on.set()
    waits.close()


def test_a_call_may_close_its_own_thread_as_garbage_does() -> None:
    waits = WaitsInCpp()
    waits.carry_out(waits.close, lambda: None)
    waits._thread.join(60)
    assert not waits._thread.is_alive()


class Silent:
    """A store whose server is frozen from some time on: its calls do not return."""

    def __init__(self, store: HashStore, frozen: threading.Event, goes_on: threading.Event) -> None:
        self._store, self._frozen, self._goes_on = store, frozen, goes_on

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            if self._frozen.is_set():
                self._goes_on.wait(60)
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_that_is_frozen_is_reported_and_given_up_at_the_time_limit(
    waits: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_in_cpp, "GLANCE", 0.02)
    for name in ("GLANCE", "POLL_INTERVAL", "FIRST_CHECK"):
        monkeypatch.setattr(watchdog, name, 0.02)
    monkeypatch.setattr(heartbeat, "FIRST_WARNING", 0.1)
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    frozen, goes_on, interrupted = threading.Event(), threading.Event(), threading.Event()
    store = Silent(HashStore(), frozen, goes_on)
    mine = Watchdog(store, 0, 2, interrupted.set, 0.5)  # type: ignore[arg-type]
    mine.issue(A)
    wait_for(lambda: 0 in mine._heartbeats._seen, 60)
    frozen.set()
    if waits:
        begin_wait(mine, A, peer=1)
        assert interrupted.wait(60)
        with pytest.raises(RanksDisagree, match=r"does not answer any more \(no answer within"):
            mine.raise_if_failed()
    wait_for(lambda: "has not answered for 0 s: the process that serves it" in caplog.text, 60)
    assert "Rank 0's last heartbeat: process " in caplog.text
    mine.leave("the test is over")  # waits for nobody
    assert interrupted.is_set() == waits
    goes_on.set()
