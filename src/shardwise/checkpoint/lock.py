"""Who writes a partial folder: a lock in it, which ends with the process that holds it.

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
import time
from pathlib import Path

from shardwise.checkpoint.disk import MODE, host

log = logging.getLogger("shardwise")

LOCK = ".lock"
LONGEST = 4096  # bytes of what a lock says that are looked at
SILENCE = 3600.0  # seconds without a change, after which what another host wrote is given up
TRIES = 5  # to make a folder, while others remove what they find there


def make_locked(path: Path) -> int:
    """Make the folder, with a lock in it, though somebody may sweep here just now."""
    for _ in range(TRIES):
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return _locked(path)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _locked(folder: Path) -> int:
    """A lock in ``folder``, held. It gets its name last, when it says whose it is."""
    unnamed = folder / f"{LOCK}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, MODE)
    try:
        os.write(lock, host().encode())
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
        os.close(lock)
        raise
    return lock


def is_alive(partial: Path) -> bool:
    """Does somebody write it, or may somebody?

    Its lock says so at once if it was made on this host. Another host's counts as alive until
    nothing in it changed for ``SILENCE`` seconds.

    One without a lock is what an exchange of names or a removal left, or its maker makes it again.
    """
    try:
        lock = os.open(partial / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:  # it is another user's
        return True
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
        changes = [path.stat().st_mtime for path in (partial, *partial.iterdir())]
    except OSError:  # a file that was there goes: somebody is at work
        return True
    return time.time() - max(changes) < SILENCE
