"""Signal handlers of a rank.

    SIGUSR1                 save, and go on
    SIGTERM, first SIGINT   save, and stop
    SIGINT after that       end at once (``KeyboardInterrupt``)

A handler only sets a flag: it runs between any two instructions, and the state of all ranks can be
saved only at the end of a step. Python runs no handler while it waits in C++, for a message of
another rank for example; so a thread ends the process soon after the last one, whatever it does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE = 2.0  # seconds
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install these handlers inside the block, and restore the previous ones afterwards.

    Off the main thread nothing changes, since Python runs handlers on the main thread only. A
    signal that the parent has set to be ignored (``nohup``) stays ignored, except SIGUSR1, which
    our launcher sets to be ignored while a rank starts.
    """
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            current = signal.getsignal(number)
            if current != signal.SIG_IGN or number == signal.SIGUSR1:
                previous[number] = current
                signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def save_and_stop_signals(save: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call ``save`` and ``stop`` on signals inside the block; see the table above."""
    stop_requested = False

    def on_save(_number: int, _frame: FrameType | None) -> None:
        save()

    def on_stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stop_requested
        if stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_requested = True
        stop()

    stop_handlers = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop}
    with signal_handlers({signal.SIGUSR1: on_save, **stop_handlers}), _ended_in_time():
        yield


@contextmanager
def _ended_in_time() -> Iterator[None]:
    """End this process ``GRACE`` seconds after a SIGINT that was not the first signal to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets a byte per signal
    left = threading.Event()
    # A forked child has the same pipe, and may get signals that this process does not.
    os.register_at_fork(after_in_child=lambda: left.is_set() or signal.set_wakeup_fd(-1))

    def watch() -> None:
        stops = 0
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT and stops and not left.wait(GRACE):
                os._exit(128 + signal.SIGINT)
            stops += number[0] in (signal.SIGINT, signal.SIGTERM)
        os.close(reader)

    threading.Thread(target=watch, name="shardwise-signals", daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(previous)
        os.close(writer)
