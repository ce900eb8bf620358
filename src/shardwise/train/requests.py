"""What a run is asked for while it runs: to save, or to save and stop.

One rank that was asked is enough. What each of them heard travels with its loss, in the one
collective that every step has anyway, so all ranks act at the same step and agreeing costs
eight bytes and no message. The ordinary way, acting on a signal where it arrives, saves on
one rank at step 9 and on another at step 10, or hangs.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

__all__ = ["Ask", "Requests", "TouchFiles", "agreed"]


class Ask(enum.IntEnum):
    """The greater includes the lesser."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


@dataclass
class Requests:
    """What this process was asked for by signals since that was last looked at.

    Attributes:
        kill_at: at the end of this step the process kills itself, as a rehearsal; 0 = never.
    """

    kill_at: int = 0
    _save: bool = False
    _stop: bool = False

    def save(self) -> None:
        """Ask to save and go on. Safe in a signal handler."""
        self._save = True

    def stop(self) -> None:
        """Ask to save and stop. Safe in a signal handler."""
        self._stop = True

    def take(self, step: int) -> Ask:
        """What was asked for; called at the end of each step. A stop is not forgotten."""
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        save, self._save = self._save, False
        return Ask.STOP if self._stop else Ask.SAVE if save else Ask.NOTHING


def agreed(heard: Iterable[float]) -> Ask:
    """What all ranks do, of what each has heard. Pure."""
    return Ask(int(max(heard)))


class TouchFiles:
    """Files in a run's folder that ask by being there: ``save`` and ``stop``. Rank 0 looks."""

    NAMES: ClassVar = {"save": Ask.SAVE, "stop": Ask.STOP}

    def __init__(self, folder: Path) -> None:
        self._asks = {folder / name: ask for name, ask in self.NAMES.items()}
        self._seen: dict[Path, int] = {}

    def seen(self) -> Ask:
        """What they ask for now."""
        found = {path: time for path in self._asks if (time := _touched(path)) is not None}
        self._seen |= found
        return max((self._asks[path] for path in found), default=Ask.NOTHING)

    def forget(self) -> str:
        """What was seen is done: remove those files; what went wrong, or ``""``.

        One that was touched since then asks again, and stays.
        """
        seen, self._seen = self._seen, {}
        for path, time in seen.items():
            try:
                if _touched(path) == time:
                    path.unlink()
            except OSError as error:
                del self._asks[path]  # or it would ask again at every step
                return f"{path} cannot be removed ({error.strerror}), and is not looked at again."
        return ""


def _touched(path: Path) -> int | None:
    """When, in nanoseconds; ``None`` where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
