"""Files and folders that survive a crash, and errors of the disk that say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.launch.error_files import ADVICE
from shardwise.plan.printed import size

T = TypeVar("T")

MODE = 0o666  # of new files, less what the umask takes
NAPS = 0.1, 0.3, 1.0
"""Seconds before what could not be read is tried again."""


@contextlib.contextmanager
def explained(what: str, reads: bool = False) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``CheckpointError`` that says ``what`` failed.

    With ``reads`` nothing is written inside.
    """
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "look at that file system")
        place = f" ({error.filename})" if error.filename else ""
        kept = "" if reads else " Complete checkpoints that were there before are as they were."
        raise CheckpointError(
            f"{what} failed: {error.strerror or error}{place}; {advice}.{kept}"
        ) from error


def retried(what: str, act: Callable[[], T], naps: Iterator[float] | None = None) -> T:
    """The result of ``act``, which only reads and is tried again after an ``OSError``.

    A mount that comes back, a stale handle or a moment without file descriptors must not look like
    damage, or a run would go on from an older checkpoint.

    ``naps`` are ``NAPS``, or what is left of them. Raises as ``explained`` does.
    """
    left = iter(NAPS) if naps is None else naps
    with explained(what, reads=True):
        while True:
            try:
                return act()
            except OSError:
                nap = next(left, None)
                if nap is None:
                    raise
                time.sleep(nap)


def text_of(error: BaseException) -> str:
    """The message of an error for other ranks; with the class, if it is no ``ShardwiseError``."""
    ours = isinstance(error, ShardwiseError)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def check_is_folder(path: Path) -> None:
    """Raises ``CheckpointError`` for a device, a pipe or a socket: reading one may never end."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is neither a folder nor a file with bytes of its own, so it is not read. Name "
            "a checkpoint, a run, or a .safetensors file."
        )


def size_of(path: Path) -> int | None:
    """Bytes of the file; ``None`` where there is no file of this name. May raise ``OSError``."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@cache
def host() -> str:
    """The name of this host and its boot: processes with the same text see each other's locks."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text("ascii").strip() if boot.exists() else ""
    return f"{platform.node()} {started}".strip()


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of ``folder``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def check_room(folder: Path, needed: int, what: str, cure: str = "") -> None:
    """Raises ``CheckpointError`` where ``what`` needs more bytes than are free.

    ``cure`` is what its caller may do besides, such as ``"lower save_total_limit, "``.
    """
    if needed > (free := free_bytes(folder)):
        raise CheckpointError(
            f"{what} needs {size(needed)}, and {folder} has {size(free)} free, so it was not "
            f"begun. Free space, {cure}or choose another disk. Complete "
            "checkpoints that were there before are as they were."
        )


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable; not on file systems that have no such call."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def make_folder(folder: Path) -> None:
    """Make the folder and missing parents, with durable names. May raise ``OSError``."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, whose bytes are on the disk when this returns."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(opened, view) :]
        os.fsync(opened)
    finally:
        os.close(opened)
