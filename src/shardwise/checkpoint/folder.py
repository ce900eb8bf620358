"""A run's folder: complete checkpoints, one that is being written, and which is the latest.

    run/
      step-100/                      complete; its manifest says so, and says when it was saved
      final/
      latest -> final
      step-300.partial-5f0c…/        being written, or left by a process that died
      step-100.removing-81d2…/       being removed
      step-200.replaced-c0de…/       a checkpoint that a new one of the same name replaces
      broken-step-250-1/             damaged: a resume went on from an older one

A checkpoint has any name but these, and no hidden one, so the next run understands what a crash
left. A lock on a file in a partial folder shows that it is still being written: the lock ends with
its process.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.disk import make_folder, sync_folder
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.lock import LOCK, is_alive, make_locked
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.plan import INDEX
from shardwise.checkpoint.recognise import (
    EXPORT,
    LATEST,
    LEFTOVER,
    files_in,
    is_ours,
    is_reserved,
    step_of,
    strangers,
    writer_of,
)
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.errors import CheckpointError

log = logging.getLogger("shardwise")

LONGEST, LONGEST_NAME = 4096, 255  # characters of ``latest`` that are read; of a name

_UNFINISHED = re.compile(rf"\.{LATEST}-[0-9a-f]{{16}}")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints in ``run``, whole or damaged; none where there is no such folder.

    A manifest makes one, or a name ``step-N``; exported weights are none. One that a crash between
    two renames left under another name is listed by its own, which ``resolve`` finds.
    """
    try:
        entries = {path.name: path for path in run.iterdir()}
        entries |= {one.name: one.path for one in leftovers(run) if one.is_lost}
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [name for name, path in entries.items() if _is_checkpoint(name, path)]
    ordered = sorted(names, key=lambda name: (step_of(name) or 0, name), reverse=True)
    return [run / name for name in ordered]


def _is_checkpoint(name: str, path: Path) -> bool:
    try:
        path.lstat()  # raises what the disk answers; since Python 3.14 ``is_dir`` is False instead
        is_own = path.is_dir() and not is_reserved(name)
        return is_own and (step_of(name) is not None or writer_of(path) not in ("", EXPORT))
    except (FileNotFoundError, PermissionError):  # gone, or such as lost+found
        return False


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
    matches = ((path, LEFTOVER.fullmatch(path.name)) for path in sorted(run.iterdir()))
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
    replaces: tuple[int, int] | None  # ``_identity`` of ``final`` when the writing began

    @classmethod
    def make(cls, final: Path, token: str) -> Partial:
        """Make one beside ``final``; see ``check_replaceable``. May raise ``OSError``."""
        make_folder(final.parent)
        path = final.with_name(f"{final.name}.partial-{token}")
        try:
            return cls(path, final, make_locked(path), _identity(final))
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def abandon(self) -> None:
        """Remove what was written, unless it was published; nothing else changes."""
        if (self.path / LOCK).exists():  # else an exchange of names put the old checkpoint there
            shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def _identity(folder: Path) -> tuple[int, int] | None:
    """The same pair as long as no other checkpoint takes this name; ``None`` without a manifest."""
    try:
        status = (folder / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_mtime_ns, status.st_size


def new_token() -> str:
    """16 random hexadecimal digits."""
    return secrets.token_hex(8)


def check_replaceable(final: Path) -> None:
    """Raises ``CheckpointError`` where ``final`` is something that no checkpoint may replace."""
    if is_reserved(final.name):
        raise CheckpointError(
            f"a checkpoint cannot be called {final.name!r}: {LATEST!r}, hidden names, broken-X-1, "
            "and names with .partial-, .removing- or .replaced- have a meaning of their own, and "
            "`resume` would not find it. Choose another name, for example step-100."
        )
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not is_ours(final):
        raise CheckpointError(
            f"{final} exists and is no checkpoint of shardwise, so it is left alone. Choose "
            "another name, or remove it."
        )


def check_latest(run: Path) -> None:
    """Raises ``CheckpointError`` where ``latest`` could not be moved."""
    latest = run / LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise CheckpointError(
            f"{latest} is a folder, and the link to the newest checkpoint must have this name; a "
            "copy that follows links makes such a folder. Nothing was written. Rename or remove it."
        )


def publish(partial: Partial) -> None:
    """Give the finished folder its name in one step, and remove an old folder of that name.

    What no save wrote in the old one moves to the new one. A failure to remove it is only logged.

    Raises:
        OSError: all names are as before; or, if only the parent folder could not be synced, the old
            one stays under another name.
        CheckpointError: another save has published this name since this one began.
    """
    final, old = partial.final, None
    hit("about to publish", 0)
    if _identity(final) not in (None, partial.replaces):
        raise CheckpointError(
            f"{final} was saved by another call while this one was writing, and stays as it is; "
            "this one is given up. Give each model a folder of its own."
        )
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
            _carry(old, final)
            remove(old)
    except OSError as error:
        log.warning("%s is complete, and what it replaced could not be removed: %s", final, error)


def _carry(old: Path, successor: Path) -> None:
    """Move what no save wrote from a checkpoint that goes into the one that has replaced it."""
    if old.is_symlink() or not (old / MANIFEST).is_file():
        return
    try:
        listed = {*Manifest.decode((old / MANIFEST).read_bytes(), str(old)).files}
    except CheckpointError:  # it is damaged: less is known, so less goes
        listed = {name for name in files_in(old) if name.endswith((".safetensors", INDEX))}
        listed |= {*files_in(successor), TRAINING}
    for name in strangers(old, listed):
        target, number = successor / name, 0
        while os.path.lexists(target):
            number += 1
            target = (successor / name).with_name(f"{Path(name).name}.{number}")
        make_folder(target.parent)
        (old / name).rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step, where system and file system can (Linux)."""
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    failed: int = renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return failed == 0


def move_latest(final: Path) -> None:
    """Point ``latest`` at ``final``: by a link, or by a text file where links are not supported."""
    latest, run = final.with_name(LATEST), final.parent
    unfinished = run / f".{LATEST}-{new_token()}"
    try:
        unfinished.symlink_to(final.name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        unfinished.write_text(final.name + "\n", "utf-8")
    try:
        unfinished.replace(latest)
    except OSError:
        unfinished.unlink()
        raise
    sync_folder(run)
    hit("latest moved", 0)


# --- removing --------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so a half-removed one never looks whole.

    Of a link, which the user made, only the link goes.
    """
    name = LEFTOVER.fullmatch(path.name)
    going = path.with_name(f"{name['name'] if name else path.name}.removing-{new_token()}")
    path.rename(going)
    hit("about to remove", 0)
    if going.is_symlink():
        log.warning("%s was a link to %s, which stays", path, going.readlink())
        going.unlink()
        return
    shutil.rmtree(going)
    hit("removed", 0)


def remove_stale_partials(run: Path) -> list[str]:
    """Remove what processes that died left in ``run``; returns the names.

    A partial folder stays while a live process writes it. A replaced checkpoint gets its name back
    if its successor never got it.
    """
    removed = []
    for one in leftovers(run) if run.is_dir() else []:
        if one.is_lost:
            one.path.rename(one.path.with_name(one.name))
        elif one.kind != "partial" or not is_alive(one.path):
            if one.kind != "removing" and (successor := one.path.with_name(one.name)).is_dir():
                _carry(one.path, successor)
            shutil.rmtree(one.path, ignore_errors=True)
            removed.append(one.path.name)
    for path in sorted(run.iterdir()) if run.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def mark_broken(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no resume tries it again; returns its new path.

    May raise ``OSError``.
    """
    number = 1
    while (place := path.with_name(f"broken-{path.name}-{number}")).exists():
        number += 1
    return resolve(path).rename(place)
