"""A conversation with a process that may be hostile: it can neither hang us nor fill our memory.

Lines are bounded, every answer has its time, and with the conversation ends the whole session of
processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from shardwise.checkpoint.header import CAP

__all__ = ["Bytes", "Silent", "Talk"]

QUIET = 600.0
"""Seconds for an answer; a large old file has to be read whole before the first."""
SLOWEST = 1 << 20
"""Bytes a second; more time than this needs nobody has."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Silent(Exception):
    """It gave no answer; the text says how."""


@dataclass(eq=False)
class Talk:
    """The process, which leads a session of its own, and what it said but nobody read yet."""

    process: subprocess.Popen[bytes]
    _rest: bytearray = field(default_factory=bytearray)

    def ask(self, text: str) -> None:
        """Say one line.

        Raises:
            Silent: it does not listen.
        """
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            os.write(self.process.stdin.fileno(), text.encode())
        except BrokenPipeError:
            return  # it has ended, and what it did not send says so
        except BlockingIOError:
            raise Silent("it does not listen") from None

    def line(self) -> bytes:
        """The next line, without its end.

        Raises:
            Silent: there is none, or it is too long.
        """
        until, seen = time.monotonic() + QUIET, 0
        while (at := self._rest.find(b"\n", seen)) < 0:
            seen = len(self._rest)
            if seen > CAP:
                raise Silent(f"it said more than {CAP:,} bytes at once")
            self._rest += self._more(1 << 20, until)
        found = bytes(self._rest[:at])
        del self._rest[: at + 1]
        return found

    def fill(self, found: Bytes) -> None:
        """Its next bytes, into ``[nbytes]``.

        Raises:
            Silent: there are fewer.
        """
        until, at = time.monotonic() + QUIET + len(found) / SLOWEST, 0
        while at < len(found):
            most = min(1 << 22, len(found) - at)
            data = bytes(self._rest[:most]) or self._more(most, until)
            del self._rest[:most]
            found[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)

    def end(self) -> None:
        """End it, and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # nobody has waited for it: still its id
        self.process.kill()

    def _more(self, most: int, until: float) -> bytes:
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(out, select.POLLIN)
        while time.monotonic() < until:
            ended = self._ended()  # asked first: what it said before is still there
            if poll.poll(0 if ended else 500):
                if data := os.read(out, most):
                    return data
                ended = self._ended(wait=True)
            if ended:
                raise Silent(ended)
        raise Silent("it did not answer in time, and was ended")

    def _ended(self, wait: bool = False) -> str:
        """How it ended, or nothing if it has not; it stays to be waited for."""
        for _ in range(20 if wait else 1):
            how = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if how is not None:
                word = "status" if how.si_code == os.CLD_EXITED else "signal"
                return f"it ended with {word} {how.si_status}"
            time.sleep(0.05 if wait else 0)
        return "it closed its end" if wait else ""
