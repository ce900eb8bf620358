"""A run's folder: complete checkpoints, one that is being written, and which is the latest.

    run/
      step-100/                      complete; its name is the number of steps taken
      step-200/
      latest -> step-200
      step-300.partial-5f0c…/        being written, or left by a process that died
      step-100.removing-81d2…/       being removed
      step-200.replaced-c0de…/       a checkpoint that a new one of the same name replaces
      broken-step-250-1/             damaged: a resume went on from an older one

A folder's name says what it is, so the next run understands what a crash left. A lock on a file in
a partial folder shows that it is still being written: the lock ends with its process.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.disk import make_folder, sync_folder
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.lock import LOCK, is_alive, make_locked
from shardwise.checkpoint.manifest import CAP, Manifest
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.errors import CheckpointError

log = logging.getLogger("shardwise")

LATEST = "latest"
CHECKPOINTS = "checkpoints"  # where ``shardwise train`` has them, in the folder of a run
LONGEST, LONGEST_NAME = 4096, 255  # characters of ``latest`` that are read; of a name

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>partial|removing|replaced)-[0-9a-f]{16}")
_UNFINISHED = re.compile(rf"\.{LATEST}-[0-9a-f]{{16}}")


def step_of(name: str) -> int | None:
    """``"step-100" → 100``; ``None`` for other names."""
    matched = _STEP.fullmatch(name)
    return int(matched[1]) if matched else None


def steps(run: Path) -> list[Path]:
    """The folders of ``run`` that are named for a step, the highest first."""
    return _by_step(path for path in run.iterdir() if path.is_dir())


def _by_step(paths: Iterable[Path]) -> list[Path]:
    numbers = {path: step_of(path.name) for path in paths}
    numbered = {path: number for path, number in numbers.items() if number is not None}
    return sorted(numbered, key=lambda path: numbered[path], reverse=True)


def is_leftover(name: str) -> bool:
    """Is it the name of a folder that is no checkpoint yet, or no longer?"""
    return _LEFTOVER.fullmatch(name) is not None


def steps_to_resume(run: Path) -> list[Path]:
    """``steps``, and checkpoints that a crash between two renames left under another name.

    ``resolve`` finds the latter. The list is empty where there is no folder ``run``.
    """
    try:
        lost = [one.path.with_name(one.name) for one in leftovers(run) if one.is_lost]
        return _by_step({*steps(run), *lost})
    except FileNotFoundError:
        return []


class Leftover(NamedTuple):
    """A folder that is no checkpoint yet, or no longer."""

    path: Path
    kind: str  # "partial", "removing" or "replaced"
    name: str  # of the checkpoint that it belongs to

    @property
    def is_lost(self) -> bool:
        """Did a crash between two renames leave this as the only checkpoint of its name?"""
        return self.kind == "replaced" and not self.path.with_name(self.name).exists()


def leftovers(run: Path) -> list[Leftover]:
    """Folders that a crash left in ``run``, and those that are being written; sorted by name."""
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in sorted(run.iterdir()))
    return [
        Leftover(path, name["kind"], name["name"])
        for path, name in matches
        if name is not None and path.is_dir() and not path.is_symlink()
    ]


# --- reading ---------------------------------------------------------------------------------


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, what ``latest`` points at, or a replaced one."""
    name = target_of(path.parent) if path.name == LATEST else None
    if name is not None and ("/" in name or name in ("", ".", "..") or len(name) > LONGEST_NAME):
        raise CheckpointError(
            f"{path} points at {name!r:.80}, which is no folder beside it, and is not followed. "
            "Name the checkpoint itself."
        )
    target = path if name is None else path.parent / name
    if target.exists():
        return target
    for other in leftovers(path.parent) if path.parent.is_dir() else []:
        if other.is_lost and other.name == target.name:
            return other.path
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    seen = f"beside it are {', '.join(beside[:8])}" if beside else "its folder is empty or absent"
    raise CheckpointError(f"{path}: there is no checkpoint here; {seen}. Name one that is there.")


def target_of(run: Path) -> str | None:
    """The name that ``latest`` holds, as a link or as text; ``None`` where a run has none."""
    path = run / LATEST
    if path.is_symlink():
        return str(path.readlink())
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST).strip()


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partial:
    """A folder that is being written and will be called ``final``; rank 0 keeps it locked."""

    path: Path
    final: Path
    lock: FileIO

    @classmethod
    def make(cls, final: Path, token: str) -> Partial:
        """Make one beside ``final``, which must be free or a checkpoint. May raise ``OSError``."""
        check_replaceable(final)
        make_folder(final.parent)
        path = final.with_name(f"{final.name}.partial-{token}")
        try:
            return cls(path, final, make_locked(path))
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def abandon(self) -> None:
        """Remove what was written, unless it was published; nothing else changes."""
        if (self.path / LOCK).exists():  # else an exchange of names put the old checkpoint there
            shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def new_token() -> str:
    """16 random hexadecimal digits."""
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
    if not _is_ours(final):
        raise CheckpointError(
            f"{final} exists and is no checkpoint of shardwise, so it is left alone. Choose "
            "another name, or remove it."
        )


def _is_ours(folder: Path) -> bool:
    """Is it a checkpoint of shardwise? Other programs call files manifest.json, too.

    A damaged manifest in a folder ``step-N`` must not keep that run from saving again.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return False
    if step_of(folder.name) is not None:
        return True
    try:
        Manifest.decode(path.read_bytes() if path.stat().st_size <= CAP else b"", str(path))
    except CheckpointError:
        return False
    return True


def publish(partial: Partial) -> None:
    """Give the finished folder its name in one step, and remove an old folder of that name.

    May raise ``OSError``. Then all names are as before; or, if only the parent folder could not be
    synced, the old one stays under another name. That it cannot be removed is only logged.
    """
    final, old = partial.final, None
    hit("about to publish", 0)
    if not final.exists() or not any(final.iterdir()):
        partial.path.rename(final)
    elif _exchange(partial.path, final):
        old = partial.path
    else:
        old = final.with_name(f"{final.name}.replaced-{new_token()}")
        final.rename(old)
        try:
            partial.path.rename(final)
        except OSError:
            old.rename(final)
            raise
    sync_folder(final.parent)
    hit("published", 0)
    partial.lock.close()
    try:
        (final / LOCK).unlink(missing_ok=True)
        if old is not None:
            remove(old)
    except OSError as error:
        log.warning("%s is complete, and what it replaced could not be removed: %s", final, error)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step, where system and file system can (Linux)."""
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
    hit("latest moved", 0)


# --- removing --------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so a half-removed one never looks whole."""
    name = _LEFTOVER.fullmatch(path.name)
    going = path.with_name(f"{name['name'] if name else path.name}.removing-{new_token()}")
    path.rename(going)
    hit("about to remove", 0)
    shutil.rmtree(going)
    hit("removed", 0)


def remove_stale_partials(run: Path) -> list[str]:
    """Remove what processes that died left in ``run``; returns the names.

    A partial folder stays while a live process writes it. A replaced checkpoint gets its name back
    if its successor never got it.
    """
    gone = []
    for one in leftovers(run) if run.is_dir() else []:
        if one.is_lost:
            one.path.rename(one.path.with_name(one.name))
        elif one.kind != "partial" or not is_alive(one.path):
            shutil.rmtree(one.path, ignore_errors=True)
            gone.append(one.path.name)
    for path in sorted(run.iterdir()) if run.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
            gone.append(path.name)
    return gone


def mark_broken(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no resume tries it again; returns its new path.

    May raise ``OSError``.
    """
    number = 1
    while (place := path.with_name(f"broken-{path.name}-{number}")).exists():
        number += 1
    return resolve(path).rename(place)
