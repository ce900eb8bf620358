from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardwise.launch.signals import save_and_stop_signals, signal_handlers

NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_each_signal_asks_for_what_the_table_says() -> None:
    requests: list[str] = []
    with save_and_stop_signals(lambda: requests.append("save"), lambda: requests.append("stop")):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            send(number)
    assert requests == ["save", "stop", "stop", "save"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_that_ends_at_once(first: int) -> None:
    events: list[str] = []

    def interrupted() -> None:
        with save_and_stop_signals(lambda: None, lambda: events.append("stop")):
            send(first)
            events.append("goes on")
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert events == ["stop", "goes on"]


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


def test_a_launcher_may_hide_the_signal_to_save_until_there_are_handlers() -> None:
    requests: list[str] = []
    with signal_handlers({signal.SIGUSR1: signal.SIG_IGN}):
        send(signal.SIGUSR1)
        with save_and_stop_signals(lambda: requests.append("save"), lambda: None):
            send(signal.SIGUSR1)
    assert requests == ["save"]


def test_off_the_main_thread_nothing_changes() -> None:
    handlers = []

    def look() -> None:
        with save_and_stop_signals(lambda: None, lambda: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


# ---- where Python runs no handler ----------------------------------------------------------------

DEAF = """
import ctypes, os, signal, sys, time
from shardwise.launch import signals
signals.GRACE = 0.1
mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + 3, 0)
with signals.save_and_stop_signals(lambda: None, lambda: None):
    print("ready", flush=True)
    for _ in range(2):  # the second waits for three seconds, which no signal ends
        ctypes.CDLL(None).pthread_mutex_timedlock(mutex, until)
    os._exit(5)
"""
FORKED = """
import os, signal, time
from shardwise.launch import signals
signals.GRACE = 0.1
with signals.save_and_stop_signals(lambda: None, lambda: None):
    if not os.fork():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os._exit(0)
    os.wait()
    time.sleep(0.5)
    os._exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the mutex is that of Linux")
@pytest.mark.parametrize(("sent", "status"), [("INT INT", 130), ("TERM INT", 130), ("INT", 5)])
def test_a_second_interrupt_ends_a_wait_in_another_language(sent: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for name in sent.split():
            process.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.2)  # two at once may be one
        assert process.wait(60) == status


def test_the_signals_of_a_forked_child_are_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED], check=False).returncode == 5
