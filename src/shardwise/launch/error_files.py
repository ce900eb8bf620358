"""Error files: a failing rank writes its error to a file, and the launcher finds the root cause.

torchrun reports a failed rank in some sixty lines, with the error in the middle or not at all.
Here each rank writes its error to the file that the launcher named (torchrun reads it, too), and
the launcher tells the root cause from its consequences on other ranks.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import RanksDisagree, ShardwiseError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable: path of a rank's error file

ADVICE = {
    errno.ENOSPC: "the disk is full: free space there, or choose another place",
    errno.EDQUOT: "the quota is used up: free space there, or choose another place",
    errno.EFBIG: "a file may not become as large: raise the limit (ulimit -f), lower "
    "max_file_size, or choose another file system",
    errno.EROFS: "it is mounted read-only: mount it for writing, or choose another place",
    errno.EACCES: "this user may not do that there: change its permissions",
    errno.EPERM: "this user may not do that there: change its permissions",
    errno.ENOENT: "it is not there, or no longer: check whether it was moved or unmounted",
    errno.EISDIR: "a folder has the name of a file here: rename one of them",
    errno.ENOTDIR: "a file has the name of a folder here: rename one of them",
    errno.EIO: "the disk fails: look at the system's log, and use a copy or another disk",
}
"""What to do about an error of the operating system, by its number."""


def os_error_message(error: OSError) -> str:
    """An error of the operating system in one sentence: the path, the cause and what to do."""
    why = error.strerror or str(error) or type(error).__name__
    place = error.filename if error.filename is not None else "a file, a pipe or a socket"
    advice = ADVICE.get(error.errno or 0)
    folder = Path(place).parent if isinstance(place, str) else Path()
    if error.errno == errno.ENOENT and not folder.exists():
        advice = f"there is no folder {folder}: make it, or choose another place"
    return f"{place} cannot be used: {'; '.join(filter(None, (why, advice)))}."


# --- in a rank -------------------------------------------------------------------------------


@contextmanager
def record_errors() -> Iterator[None]:
    """Write an error raised inside to this rank's error file, then let it propagate.

    Use it inside ``with connect()``: when that block ends, the other ranks see that this one is
    gone, and the launcher may kill it before it can write.
    """
    try:
        yield
    except Exception as error:
        write_error_file(error)
        raise


@contextmanager
def told_by_launcher(kind: type[Exception] = ShardwiseError) -> Iterator[None]:
    """An error of that kind ends this rank silently where a launcher tells it, once for all."""
    try:
        yield
    except kind as error:
        if write_error_file(error):
            sys.exit(1)
        raise


def write_error_file(error: BaseException) -> bool:
    """Write ``error`` to this rank's error file, unless one was written before.

    A ``ShardwiseError`` is written as its message, an ``OSError`` as ``os_error_message``, any
    other error with its traceback.

    Returns:
        Whether there is a launcher that reads it.
    """
    if ERROR_FILE not in os.environ:
        return False
    error_file = Path(os.environ[ERROR_FILE])
    if error_file.exists() and error_file.stat().st_size:
        return True
    message = str(error)
    if isinstance(error, OSError):
        message = os_error_message(error)
    elif not isinstance(error, ShardwiseError):
        message = "".join(traceback.format_exception(error)).rstrip()
    timestamp = time.time()
    is_consequence = isinstance(error, RanksDisagree)
    extra_info = {
        "py_callstack": message,
        "timestamp": str(int(timestamp)),
        "exact": timestamp,
        "is_consequence": is_consequence,
        "is_permanent": isinstance(error, ShardwiseError) and not is_consequence,
    }
    report = json.dumps({"message": {"message": message, "extraInfo": extra_info}})
    error_file.write_text(report, "utf-8")
    return True


# --- in the launcher -------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with a status other than 0, or the store at which the ranks meet.

    Attributes:
        rank, pid: of the process; the store's rank is -1.
        status: its exit status; minus the signal's number if a signal ended it.
        timestamp: seconds since 1970: of the error if it was written, else when the end was seen.
        message: the error that it wrote, or ``""``.
        is_consequence: the error reports the failure of another rank.
        is_permanent: the rank would fail again in the same way: its own ``ShardwiseError``.
    """

    rank: int
    pid: int
    status: int
    timestamp: float
    message: str = ""
    is_consequence: bool = False
    is_permanent: bool = False

    @classmethod
    def from_error_file(cls, rank: int, pid: int, status: int, error_file: Path) -> RankFailure:
        """Read ``error_file`` for the error, if the rank wrote one."""
        now = time.time()
        try:
            report = json.loads(error_file.read_text("utf-8"))["message"]
            extra_info = report["extraInfo"]
            timestamp = float(extra_info.get("exact", extra_info["timestamp"]))
            flags = (
                bool(extra_info.get("is_consequence", False)),
                bool(extra_info.get("is_permanent", False)),
            )
            return cls(rank, pid, status, timestamp, str(report["message"]), *flags)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(rank, pid, status, now)

    @classmethod
    def of_store(cls, pid: int, status: int) -> RankFailure:
        """The end of the store's process, which nobody but SIGKILL should have caused."""
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended ({status})"
        message = f"the store at which the ranks meet (shardwise-store, process {pid}) {how}"
        return cls(-1, pid, status, time.time(), message)

    @property
    def summary(self) -> str:
        """Say in one clause how the rank ended."""
        if self.message.startswith("rank ") or self.rank < 0:
            return self.message
        if self.message:
            return f"rank {self.rank}: {self.message}"
        if self.status >= 0:
            return f"rank {self.rank} ended with status {self.status} and left no reason"
        name = _signal_name(-self.status)
        return f"rank {self.rank} (process {self.pid}) was killed by {name}"

    @property
    def error_message(self) -> str:
        """The message for the user."""
        if self.message:
            return self.summary + "." * (self.rank < 0)
        if self.status >= 0:
            return f"{self.summary}; see above."
        if self.status != -signal.SIGKILL:
            return f"{self.summary}."
        return (
            f"{self.summary}. If nobody did so on purpose, the system was out of memory: lower "
            "batch.micro or data.context, or use a smaller model."
        )


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that led to the others. Pure.

    First the store, then a rank that ended without an error file, then a rank's own error, then an
    error about another rank, and last one that the launcher ended (SIGTERM) when another failed.
    """

    def suspicion(failure: RankFailure) -> tuple[int, float]:
        if failure.rank < 0:
            return -1, failure.timestamp
        if failure.message:
            return (2 if failure.is_consequence else 1), failure.timestamp
        return (3 if failure.status == -signal.SIGTERM else 0), failure.timestamp

    return min(failures, key=suspicion)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
