"""Signal handlers of a rank.

    SIGUSR1                 save, and go on
    SIGTERM, first SIGINT   save, and stop
    SIGINT after that       end at once (``KeyboardInterrupt``)

A handler only sets a flag: it runs between any two instructions, and the state of all ranks can be
saved only at the end of a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["save_and_stop_signals", "signal_handlers"]

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
    """Inside the block, signals call ``save`` and ``stop``; see the table above."""
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
    with signal_handlers({signal.SIGUSR1: on_save, **stop_handlers}):
        yield
