"""Requests to a running job: to save, or to save and stop.

A request to one rank is enough. Each rank sends its request with its loss, in the collective that
every step has anyway, so all ranks act at the same step for eight more bytes. Acting on a signal
as it arrives would save on one rank at step 9 and on another at step 10, or hang.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


class Request(enum.IntEnum):
    """A greater value includes the lesser ones."""

    NONE = 0
    SAVE = 1
    STOP = 2


@dataclass
class SignalRequests:
    """Requests that signals made to this process since the last ``take``.

    Attributes:
        kill_at: at the end of this step the process kills itself, to test a crash; 0 = never.
    """

    kill_at: int = 0
    _save: bool = False
    _stop: bool = False

    def save(self) -> None:
        """Request to save and continue. Safe in a signal handler."""
        self._save = True

    def stop(self) -> None:
        """Request to save and stop. Safe in a signal handler."""
        self._stop = True

    @property
    def stops(self) -> bool:
        """Is the run to stop?"""
        return self._stop

    def take(self, step: int) -> Request:
        """The current request, called at the end of each step; a stop request stays."""
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        save, self._save = self._save, False
        return Request.STOP if self._stop else Request.SAVE if save else Request.NONE


def combined(requests: Iterable[float]) -> Request:
    """The request that all ranks follow: the strongest of any rank's. Pure."""
    return Request(int(max(requests)))


class FileRequests:
    """Requests by files named ``save`` and ``stop`` in a run's folder. Rank 0 polls them."""

    NAMES: ClassVar = {"save": Request.SAVE, "stop": Request.STOP}

    def __init__(self, folder: Path) -> None:
        self._requests = {folder / name: request for name, request in self.NAMES.items()}
        self._handled: dict[Path, int] = {}

    def poll(self) -> Request:
        """The strongest request of the files that exist now."""
        present = {
            path: time for path in self._requests if (time := _modified_ns(path)) is not None
        }
        self._handled |= present
        return max((self._requests[path] for path in present), default=Request.NONE)

    def remove_handled(self) -> str:
        """Remove the files that ``poll`` saw; returns an error message, or ``""``.

        A file that was touched since then is a new request, and stays.
        """
        handled, self._handled = self._handled, {}
        for path, modified_ns in handled.items():
            try:
                if _modified_ns(path) == modified_ns:
                    path.unlink()
            except OSError as error:
                del self._requests[path]  # or it would request again at every step
                return f"{path} cannot be removed ({error.strerror}), and is ignored from now on."
        return ""


def _modified_ns(path: Path) -> int | None:
    """The modification time in nanoseconds; ``None`` if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
