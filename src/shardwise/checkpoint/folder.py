"""A run's folder: complete checkpoints, one that is being written, and which is the latest.

    run/
      step-100/                      complete; its name is the number of steps taken
      step-200/
      latest -> step-200
      step-300.partial-5f0c…/        being written, or left by a process that died
      step-100.removing-81d2…/       on its way out
      step-200.replaced-c0de…/       a checkpoint that a new one of the same name replaces
      broken-step-250-1/             damaged: a resume went on from an older one

A folder's name says what it is, so a crash at any moment leaves what the next run understands.
Whether a partial one is still being written, a lock on a file in it says: it ends with the
process that holds it, however that process ends.
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
LONGEST, LONGEST_NAME = 4096, 255  # characters of what it says that are looked at; of a name

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
    """Is it what only a folder is called that is no checkpoint yet, or no longer?"""
    return _LEFTOVER.fullmatch(name) is not None


def steps_to_resume(run: Path) -> list[Path]:
    """``steps``, and those that a crash between two renames left without their name.

    ``resolve`` knows where the latter are. None where there is no folder ``run``.
    """
    try:
        lost = [one.path.with_name(one.name) for one in leftovers(run) if one.is_lost]
        return _by_step({*steps(run), *lost})
    except FileNotFoundError:
        return []


class Leftover(NamedTuple):
    """A folder that is no checkpoint, or not yet, or no longer.

    Attributes:
        path: where it is.
        kind: ``"partial"``, ``"removing"`` or ``"replaced"``.
        name: of the checkpoint that it belongs to.
    """

    path: Path
    kind: str
    name: str

    @property
    def is_lost(self) -> bool:
        """Is it the only checkpoint of its name, which a crash between two renames took away?"""
        return self.kind == "replaced" and not self.path.with_name(self.name).exists()


def leftovers(run: Path) -> list[Leftover]:
    """What a crash may have left in ``run``, or what is being written there now; by name."""
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in sorted(run.iterdir()))
    return [
        Leftover(path, name["kind"], name["name"])
        for path, name in matches
        if name is not None and path.is_dir() and not path.is_symlink()
    ]


# --- reading ---------------------------------------------------------------------------------


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, what ``latest`` points at, or a replaced one."""
    points = path.name == LATEST and (path.is_symlink() or path.is_file())
    target = _pointed(path) if points else path
    if target.exists():
        return target
    for other in leftovers(path.parent) if path.parent.is_dir() else []:
        if other.is_lost and other.name == target.name:
            return other.path
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    seen = f"beside it are {', '.join(beside[:8])}" if beside else "its folder is empty or absent"
    raise CheckpointError(f"{path}: there is no checkpoint here; {seen}. Name one that is there.")


def target_of(run: Path) -> str | None:
    """What ``latest`` says in a run's folder, if it is there: usually a name beside it."""
    path = run / LATEST
    return _said(path) if path.is_symlink() or path.is_file() else None


def _said(path: Path) -> str:
    if path.is_symlink():
        return str(path.readlink())
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST).strip()


def _pointed(path: Path) -> Path:
    """Where ``latest`` leads: a sibling, by a link, or by its name as text."""
    name = _said(path)
    if "/" in name or name in ("", ".", "..") or len(name) > LONGEST_NAME:
        raise CheckpointError(
            f"{path} points at {name!r:.80}, which is no folder beside it, and is not followed. "
            "Name the checkpoint itself."
        )
    return path.parent / name


# --- a checkpoint on its way -----------------------------------------------------------------


@dataclass(frozen=True)
class Partial:
    """A folder that is being written; rank 0 made it, and keeps it locked.

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
        make_folder(final.parent)
        path = final.with_name(f"{final.name}.partial-{token}")
        try:
            return cls(path, final, make_locked(path))
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise

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
    if not _is_ours(final):
        raise CheckpointError(
            f"{final} exists and is no checkpoint of shardwise, so it is left alone. Choose "
            "another name, or remove it."
        )


def _is_ours(folder: Path) -> bool:
    """Many a folder of others holds a manifest.json, too: a web site does.

    A damaged one in a folder that only a run calls so must not keep that run from saving again.
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
    """Give the finished folder its name, at once; an old one of that name goes.

    May raise ``OSError``. Then all has its name of before, unless only the parent folder could not
    be synced. That the old one cannot be removed is no reason to raise.
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
    partial.close()
    try:
        (final / LOCK).unlink(missing_ok=True)
        if old is not None:
            remove(old)
    except OSError as error:
        log.warning("%s is complete, and what it replaced could not be removed: %s", final, error)


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
    hit("latest moved", 0)


# --- what goes -------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so half of it never looks like a whole one."""
    name = _LEFTOVER.fullmatch(path.name)
    going = path.with_name(f"{name['name'] if name else path.name}.removing-{new_token()}")
    path.rename(going)
    hit("about to remove", 0)
    shutil.rmtree(going)
    hit("removed", 0)


def remove_stale_partials(run: Path) -> list[str]:
    """Remove what processes that died left in ``run``; returns the names.

    A partial folder goes unless somebody alive writes it. A replaced checkpoint whose successor
    never got its name gets it back.
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
    """Rename a damaged checkpoint, so that no resume tries it again; its new path.

    It is there to be looked at or removed by a person. May raise ``OSError``.
    """
    number = 1
    while (place := path.with_name(f"broken-{path.name}-{number}")).exists():
        number += 1
    return resolve(path).rename(place)
