"""A lock in a partial folder: it ends with the process that writes there.

Some file systems keep locks within a host (Lustre with ``localflock``, NFS with ``nolock``), and
some have none. So the lock's file says which host its holder is on, and what another host writes
counts as alive until nothing in it changed for an hour.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from io import FileIO
from pathlib import Path

from shardwise.checkpoint.disk import MODE, host

log = logging.getLogger("shardwise")

LOCK = ".lock"
LONGEST = 4096  # bytes of what a lock says that are looked at
SILENCE = 3600.0  # seconds without a change, after which what another host wrote is given up
TRIES = 5  # to make a folder, while others remove what they find there


def make_locked(path: Path) -> FileIO:
    """Make the folder, with a lock in it that lasts until it is closed.

    Another process may remove the folder in between, as it removes what a crash left.
    """
    for _ in range(TRIES):
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return _locked(path)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _locked(folder: Path) -> FileIO:
    """A lock in ``folder``. It gets its name last, when it says which host holds it."""
    unnamed = folder / f"{LOCK}.new"
    lock = FileIO(os.open(unnamed, os.O_RDWR | os.O_CREAT, MODE), "r+")
    try:
        lock.write(host().encode())
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log.warning(
                "%s: this file system has no locks, so what a crash may leave here is removed only "
                "when it is an hour old",
                folder,
            )
        unnamed.rename(folder / LOCK)
    except BaseException:
        lock.close()
        raise
    return lock


def is_alive(partial: Path) -> bool:
    """May a process still be writing this folder?

    A lock that was made on this host says it at once. Of another host's silence the file system
    says how long it is, since the clocks of hosts differ. A folder without a lock is what an
    exchange of names or a removal left; or its maker, who finds it gone, makes it again.
    """
    try:
        os.utime(partial / LOCK)
        now = (partial / LOCK).stat().st_mtime
        lock = os.open(partial / LOCK, os.O_RDWR)
    except OSError as error:  # it is another user's, or there is none
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(lock, LONGEST, 0) == host().encode():
            return False
    except BlockingIOError:
        return True
    except OSError:
        pass  # there are no locks here
    finally:
        os.close(lock)
    try:
        files = (path for path in partial.rglob("*") if path.name != LOCK)
        return now - max(path.stat().st_mtime for path in (partial, *files)) < SILENCE
    except OSError:  # a file that was there goes: somebody is at work
        return True
