from __future__ import annotations

import os
import signal
import threading

import pytest

from shardwise.launch.signals import save_and_stop_signals, signal_handlers

NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_each_signal_asks_for_what_the_table_says() -> None:
    asked: list[str] = []
    with save_and_stop_signals(lambda: asked.append("save"), lambda: asked.append("stop")):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            send(number)
    assert asked == ["save", "stop", "stop", "save"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_that_ends_at_once(first: int) -> None:
    asked: list[str] = []

    def interrupted() -> None:
        with save_and_stop_signals(lambda: None, lambda: asked.append("stop")):
            send(first)
            asked.append("goes on")
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert asked == ["stop", "goes on"]


def test_afterwards_all_is_as_before() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with save_and_stop_signals(lambda: None, lambda: None):
        assert [signal.getsignal(number) for number in NUMBERS] != before
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_what_is_ignored_from_outside_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with save_and_stop_signals(lambda: None, lambda: None):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_launcher_may_hide_the_signal_to_save_until_there_are_ears() -> None:
    asked: list[str] = []
    with signal_handlers({signal.SIGUSR1: signal.SIG_IGN}):
        send(signal.SIGUSR1)
        with save_and_stop_signals(lambda: asked.append("save"), lambda: None):
            send(signal.SIGUSR1)
    assert asked == ["save"]


def test_off_the_main_thread_nothing_changes() -> None:
    found = []

    def look() -> None:
        with save_and_stop_signals(lambda: None, lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
