"""Calls that wait in C++, on a thread, so that the rank's own can go on, or can be woken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

T = TypeVar("T")

GLANCE = 0.5  # seconds between two checks during a call


class WaitsInCpp:
    """A thread that carries out one call after the other."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        arguments = (self._calls,)
        self._thread = Thread(target=_carry_out, args=arguments, name="shardwise-wait", daemon=True)
        self._thread.start()

    def carry_out(
        self, call: Callable[[], T], check: Callable[[], None], glance: float = GLANCE
    ) -> T:
        """The result of ``call``; meanwhile ``check`` and Ctrl-C may raise here."""
        ended: Future[T] = Future()
        self._calls.put((call, ended))
        while True:
            with suppress(TimeoutError):
                return ended.result(glance)
            check()

    def close(self) -> None:
        """End the thread; one that still waits ends later."""
        self._calls.put(None)
        if self._thread is not current_thread():  # where garbage may be collected, too
            self._thread.join(GLANCE)

    def __del__(self) -> None:
        self._calls.put(None)


def _carry_out(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while item := calls.get():
        call, ended = item
        try:
            ended.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            ended.set_exception(error)
        del item, call, ended  # the work is the waiting thread's
