"""What a process is told from outside: to save, to stop when it can, to end now.

    SIGUSR1                 save, and go on
    SIGTERM, first SIGINT   save, and stop
    SIGINT after that       end at once (``KeyboardInterrupt``)

A handler only makes a note: it runs between any two instructions, and only at the end of a step
do all ranks hold what can be saved.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["handled", "listening"]

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """These signals are handled so inside; afterwards as before.

    Off the main thread nothing is changed, since Python handles signals there only. A signal that
    is ignored from outside (``nohup``) stays ignored, but SIGUSR1, which our launcher hides from
    ranks that have just started.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            was = signal.getsignal(number)
            if was != signal.SIG_IGN or number == signal.SIGUSR1:
                before[number] = was
                signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


@contextmanager
def listening(save: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Inside, signals call ``save`` and ``stop``; see the table above."""
    asked_to_stop = False

    def on_save(_number: int, _frame: FrameType | None) -> None:
        save()

    def on_stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        if asked_to_stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked_to_stop = True
        stop()

    both = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop}
    with handled({signal.SIGUSR1: on_save, **both}):
        yield
