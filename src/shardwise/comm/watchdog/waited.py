"""A wait that is said now and then: after five seconds, then each time that it has doubled."""

from __future__ import annotations

from time import monotonic

from shardwise.comm.watchdog import heartbeat


class Waited:
    """A wait since a time of ``monotonic()``, by default now. Final."""

    def __init__(self, since: float | None = None) -> None:
        self.since = monotonic() if since is None else since
        self.next = heartbeat.FIRST_WARNING  # how long it has to be before it is said

    @property
    def seconds(self) -> float:
        return monotonic() - self.since

    def is_due(self) -> bool:
        """Is it to be said now? Then it is not, until it has doubled."""
        is_due = (seconds := self.seconds) >= self.next
        while seconds >= self.next:
            self.next *= 2
        return is_due
