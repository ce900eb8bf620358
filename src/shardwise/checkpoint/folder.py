"""A run's folder: complete checkpoints, one that is being written, and which is the latest.

    run/
      step-100/                      complete; its name is the number of steps taken
      step-200/
      latest -> step-200
      step-300.partial-5f0c…/        being written, or left by a process that died
      step-100.removing-81d2…/       on its way out
      step-200.replaced-c0de…/       a checkpoint that a new one of the same name replaces

A folder's name says what it is, so a crash at any moment leaves what the next run understands.
Whether a partial one is still being written, a lock on a file in it says: it ends with the
process that holds it, however that process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.disk import sync_folder
from shardwise.checkpoint.points import reached
from shardwise.errors import CheckpointError

__all__ = [
    "LATEST",
    "Partial",
    "check_replaceable",
    "move_latest",
    "new_token",
    "publish",
    "remove",
    "resolve",
    "step_of",
    "steps",
    "surplus",
    "sweep",
    "target_of",
]

log = logging.getLogger("shardwise")

LATEST = "latest"
LOCK = ".lock"
GRACE = 3600.0  # seconds for which a partial folder without a lock may be one that is just made

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>partial|removing|replaced)-[0-9a-f]{16}")


def step_of(name: str) -> int | None:
    """``"step-100" → 100``; ``None`` for other names."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def steps(run: Path) -> list[Path]:
    """The folders of ``run`` that are named for a step, the newest first."""
    found = [path for path in run.iterdir() if step_of(path.name) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path.name) or 0, reverse=True)


# --- reading ---------------------------------------------------------------------------------


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, what ``latest`` points at, or a replaced one.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_symlink() or path.is_file():
        target = _pointed(path) if path.name == LATEST else path
        if target.exists():
            return target
    elif path.is_dir():
        return path
    if path.parent.is_dir():
        for other in path.parent.iterdir():  # a crash between two renames left only this
            found = _LEFTOVER.fullmatch(other.name)
            if found and found["kind"] == "replaced" and found["name"] == path.name:
                return other
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    there = f"beside it are {', '.join(beside[:8])}" if beside else "its folder is empty or absent"
    raise CheckpointError(f"{path}: there is no checkpoint here; {there}. Name one that is there.")


def target_of(run: Path) -> str | None:
    """The name that ``latest`` points at in a run's folder, if it does."""
    path = run / LATEST
    return _pointed(path).name if path.is_symlink() or path.is_file() else None


def _pointed(path: Path) -> Path:
    """Where ``latest`` leads: a sibling, by a link, or by its name as text."""
    name = str(path.readlink()) if path.is_symlink() else path.read_text("utf-8").strip()
    if "/" in name or name in ("", ".", ".."):
        raise CheckpointError(
            f"{path} points at {name!r:.80}, which is no folder beside it, and is not followed. "
            "Name the checkpoint itself."
        )
    return path.parent / name


# --- a checkpoint on its way -----------------------------------------------------------------


@dataclass(frozen=True)
class Partial:
    """A folder that is being written; rank 0 keeps it locked.

    Attributes:
        path: the folder.
        final: what it will be called.
    """

    path: Path
    final: Path
    lock: int

    @classmethod
    def make(cls, final: Path, token: str) -> Partial:
        """A new one beside ``final``, which must be free or a checkpoint. May raise ``OSError``."""
        check_replaceable(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        path = final.with_name(f"{final.name}.partial-{token}")
        path.mkdir()
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log.warning(
                "%s: this file system has no locks, so what a crash may leave here is not removed "
                "by itself",
                path,
            )
        return cls(path, final, lock)

    def close(self) -> None:
        """Let the lock go."""
        os.close(self.lock)

    def abandon(self) -> None:
        """Remove what was written; nothing that was there before changes."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def new_token() -> str:
    """16 hexadecimal digits that nobody else has."""
    return secrets.token_hex(8)


def check_replaceable(final: Path) -> None:
    """Raises ``CheckpointError`` where ``final`` is something that no checkpoint may replace."""
    if final.name == LATEST or _LEFTOVER.fullmatch(final.name):
        raise CheckpointError(
            f"a checkpoint cannot be called {final.name!r}: {LATEST!r} and names with .partial-, "
            ".removing- or .replaced- have a meaning of their own. Choose another name, for "
            "example step-100."
        )
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not (final / "manifest.json").is_file():
        raise CheckpointError(
            f"{final} exists and is no checkpoint of shardwise, so it is left alone. Choose "
            "another name, or remove it."
        )


def publish(partial: Partial) -> None:
    """Give the finished folder its name, at once; an old one of that name goes. May raise."""
    final, old = partial.final, None
    reached("about to publish", 0)
    if not final.exists() or not any(final.iterdir()):
        partial.path.rename(final)
    elif _exchange(partial.path, final):
        old = partial.path
    else:
        old = final.with_name(f"{final.name}.replaced-{new_token()}")
        final.rename(old)
        partial.path.rename(final)
    sync_folder(final.parent)
    reached("published", 0)
    # Only now: without it, what a crash leaves looks like a folder that is just made.
    (final / LOCK).unlink(missing_ok=True)
    partial.close()
    if old is not None:
        remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders' names in one step, where system and file system can (Linux)."""
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return failed == 0


def move_latest(final: Path) -> None:
    """Let ``latest`` point at ``final``: a link, or a text file where links cannot be."""
    latest, run = final.with_name(LATEST), final.parent
    unfinished = run / f".{LATEST}-{new_token()}"
    try:
        unfinished.symlink_to(final.name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        unfinished.write_text(final.name + "\n", "utf-8")
    unfinished.replace(latest)
    sync_folder(run)
    reached("latest moved", 0)


# --- what goes -------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so half of it never looks like a whole one."""
    name = _LEFTOVER.fullmatch(path.name)
    going = path.with_name(f"{name['name'] if name else path.name}.removing-{new_token()}")
    path.rename(going)
    reached("about to remove", 0)
    shutil.rmtree(going)
    reached("removed", 0)


def sweep(run: Path) -> list[str]:
    """Remove what processes that died left in ``run``; returns the names.

    A partial folder goes unless somebody alive writes it. A replaced checkpoint whose successor
    never got its name gets it back.
    """
    gone = []
    for path in sorted(run.iterdir()) if run.is_dir() else []:
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        final = path.with_name(found["name"])
        if found["kind"] == "replaced" and not final.exists():
            path.rename(final)
        elif found["kind"] != "partial" or not _is_alive(path):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
    return gone


def _is_alive(partial: Path) -> bool:
    """Does somebody hold its lock, or is it so young that its lock may be about to come?"""
    try:
        lock = os.open(partial / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - partial.stat().st_mtime < GRACE
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or nobody can know
        return True
    finally:
        os.close(lock)
    return False


def surplus(
    complete: Sequence[tuple[Path, float | None]], limit: int, keep_best: str | None
) -> list[Path]:
    """Which checkpoints go so that ``limit`` stay. Pure.

    Args:
        complete: folders and how good each is, the newest first.
        limit: how many stay, at least 1; the best one counts.
        keep_best: ``"lowest"`` or ``"highest"`` metric stays, however old; or ``None``.
    """
    measured = [(metric, path) for path, metric in complete if metric is not None]
    pick = {"lowest": min, "highest": max}
    best = pick[keep_best](measured, key=lambda m: m[0])[1] if keep_best and measured else None
    first = [complete[0][0]] if complete else []
    ordered = dict.fromkeys([*first, *([best] if best else []), *(path for path, _ in complete)])
    return list(ordered)[max(limit, 1 + (best is not None and best not in first)) :]
