"""Streams and events with vector clocks.

A clock says, for each stream and the host, how many of its operations come before. An operation
comes after another one if the clock that it was issued with has the other's number.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Clock", "Event", "Stamp", "Stream"]

DEVICE = torch.device("cuda", 0)
_numbers = itertools.count()


class Clock(dict[str, int]):
    """For each stream, how many of its operations come before."""

    def join(self, other: Clock) -> None:
        for name, count in other.items():
            self[name] = max(count, self.get(name, 0))

    def knows(self, stamp: Stamp) -> bool:
        return self.get(stamp.stream, 0) >= stamp.number


@dataclass(frozen=True)
class Stamp:
    """An operation: the ``number``-th of a stream."""

    stream: str
    number: int
    what: str


class Stream:
    """A queue of a device, or the host.

    Args:
        waits: what it is given is done when something waits for it, and not at once.
        host: what issues all operations, and so comes before those that it has yet to issue.
    """

    def __init__(
        self,
        name: str = "",
        waits: bool = True,
        host: Stream | None = None,
        device: torch.device = DEVICE,
    ) -> None:
        self.name, self.device = f"{name or 'stream'} {next(_numbers)}", device
        self.clock, self.waits, self.host = Clock(), waits, host
        self.awaited = list[str]()  # by the host: what made it wait
        self._queue: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    def __repr__(self) -> str:
        return self.name

    def stamp(self, what: str) -> Stamp:
        """Issue an operation."""
        if self.host is not None:
            self.clock.join(self.host.clock)
        number = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Stamp(self.name, number, what)

    def give(self, operation: Callable[[], None]) -> None:
        """Do it now, or when something waits for it."""
        if not self.waits:
            operation()
            return
        self._queue.append(operation)
        self._given += 1

    def finish(self) -> None:
        """Do all that was given."""
        self.catch_up(self._given)

    def catch_up(self, position: int) -> None:
        """Do what was given up to a position; nobody sees it, since it was issued before."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            while self._done < position:
                self._done += 1
                self._queue.popleft()()

    def has_done(self, position: int) -> bool:
        return self._done >= position

    # ---- as torch.Stream, without query and synchronize, which Gaudi's guard does not have ---

    def record_event(self, _: object = None) -> Event:
        if self.host is not None:
            self.clock.join(self.host.clock)
        return Event(self, Clock(self.clock), self._given)

    def wait_event(self, event: Event) -> None:
        self.clock.join(event.clock)
        self.give(event.reached)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def is_capturing(self) -> bool:
        """No graph is captured; torch's optimizers ask."""
        return False

    def __enter__(self) -> Self:
        self._before: Any = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


@dataclass
class Event:
    """A place in a stream."""

    stream: Stream
    clock: Clock
    position: int

    def reached(self) -> None:
        self.stream.catch_up(self.position)

    def query(self) -> bool:
        """Has the stream done what was given to it by then? The watchdog's thread may ask."""
        return self.stream.has_done(self.position)

    def synchronize(self, what: str = "synchronize") -> None:
        """The host waits for it; ``what`` makes it wait."""
        self.reached()
        if self.stream.host is not None:
            self.stream.host.clock.join(self.clock)
            self.stream.host.awaited.append(what)
