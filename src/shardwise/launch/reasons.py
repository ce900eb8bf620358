"""Why a rank ended: it leaves its reason in a file, and its launcher finds the one that counts.

What torchrun says when a rank fails is some sixty lines, with the reason in the middle or, if the
rank died of its own error, not at all. Here a rank leaves its reason where its launcher looks for
it (torchrun's too), and of all the ranks' reasons the cause is told from what followed from it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import RanksDisagree, ShardwiseError

__all__ = ["REPORT", "Ended", "cause", "leave_reason", "of_system", "reasons_left"]

REPORT = "TORCHELASTIC_ERROR_FILE"  # where a launcher looks for a rank's reason

_ADVICE = {
    errno.ENOSPC: "The disk is full: free space there, or choose another folder.",
    errno.EDQUOT: "The quota is used up: free space there, or choose another folder.",
    errno.EROFS: "It is mounted read-only: choose another folder.",
    errno.EACCES: "Change its permissions, or choose another folder.",
    errno.EPERM: "Change its permissions, or choose another folder.",
    errno.ENOENT: "It does not exist, or was moved or removed meanwhile.",
    errno.EISDIR: "A folder has the name of a file here: rename one of them.",
    errno.ENOTDIR: "A file has the name of a folder here: rename one of them.",
    errno.EIO: "The disk fails: look at the system's log.",
}


def of_system(error: OSError) -> str:
    """What the operating system refused, in a sentence: where, why, and what to do."""
    why = error.strerror or str(error) or type(error).__name__
    place = error.filename if error.filename is not None else "a file, a pipe or a socket"
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{place} cannot be used: {why}. {advice}".rstrip()


# --- in a rank -------------------------------------------------------------------------------


@contextmanager
def reasons_left() -> Iterator[None]:
    """An error inside is raised as always, and first left as this rank's reason.

    Use it inside ``with connect()``: once that ends, the others know that this rank is gone,
    and the launcher may end it before it can say why.
    """
    try:
        yield
    except Exception as error:
        leave_reason(error)
        raise


def leave_reason(error: BaseException) -> bool:
    """Leave this rank's reason where its launcher looks for it; the first one stays.

    An error of ours explains itself, and one of the system is explained; any other comes with its
    traceback.

    Returns:
        Whether there is a launcher that will read it.
    """
    path = os.environ.get(REPORT)
    if path is None:
        return False
    if Path(path).exists():
        return True
    said = str(error)
    if isinstance(error, OSError):
        said = of_system(error)
    elif not isinstance(error, ShardwiseError):
        said = "".join(traceback.format_exception(error)).rstrip()
    now = time.time()
    follows = isinstance(error, RanksDisagree)
    extra = {
        "py_callstack": said,
        "timestamp": str(int(now)),
        "exact": now,
        "follows": follows,
        "final": isinstance(error, ShardwiseError) and not follows,
    }
    text = json.dumps({"message": {"message": said, "extraInfo": extra}})
    Path(path).write_text(text, "utf-8")
    return True


# --- in the launcher -------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A rank that did not end well.

    Attributes:
        rank, pid: which.
        status: its exit status; of a rank that a signal ended, minus the signal's number.
        moment: seconds since 1970 when that was seen; when it said why, if it did.
        said: its reason, or ``""``.
        follows: it speaks of what happened to another rank.
        final: it would fail in the same way again: an error of ours that is its own.
    """

    rank: int
    pid: int
    status: int
    moment: float
    said: str = ""
    follows: bool = False
    final: bool = False

    @classmethod
    def found(cls, rank: int, pid: int, status: int, report: Path) -> Ended:
        """With what the rank left in ``report``, if anything."""
        now = time.time()
        try:
            message = json.loads(report.read_text("utf-8"))["message"]
            extra = message["extraInfo"]
            moment = float(extra.get("exact", extra["timestamp"]))
            flags = (bool(extra.get("follows", False)), bool(extra.get("final", False)))
            return cls(rank, pid, status, moment, str(message["message"]), *flags)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(rank, pid, status, now)

    @property
    def fact(self) -> str:
        """How it ended, in one clause."""
        if self.said.startswith("rank "):  # it says itself whose it is
            return self.said
        if self.said:
            return f"rank {self.rank}: {self.said}"
        if self.status >= 0:
            return f"rank {self.rank} ended with status {self.status} and left no reason"
        name = _name(-self.status)
        return f"rank {self.rank} (process {self.pid}) was killed by {name}"

    @property
    def reason(self) -> str:
        """What to tell the user."""
        if self.said:
            return self.fact
        if self.status >= 0:
            return f"{self.fact}; see above."
        if self.status != -signal.SIGKILL:
            return f"{self.fact}."
        return (
            f"{self.fact}. If nobody did so on purpose, the system was out of memory: lower "
            "batch.micro or data.context, or use a smaller model."
        )


def cause(ended: Sequence[Ended]) -> Ended:
    """The rank whose end led to that of the others. Pure.

    A rank that crashed could leave nothing, and the others' errors follow from its death. So
    does, mostly, what ranks say of each other. And a rank that was told to end (SIGTERM) was
    told so by the launcher, since another had failed.
    """

    def suspicion(one: Ended) -> tuple[int, float]:
        if one.said:
            return (2 if one.follows else 1), one.moment
        return (3 if one.status == -signal.SIGTERM else 0), one.moment

    return min(ended, key=suspicion)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
