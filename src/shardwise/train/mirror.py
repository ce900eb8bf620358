"""A run's checkpoints at a URL as well: uploaded beside training, one at a time.

A checkpoint may be removed from the run's folder while it is still on its way, so hard links to its
files are what is uploaded. One that is saved meanwhile waits, and of several that wait the newest.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.remote import upload
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Mirrored:
    """A checkpoint is at the URL, or why it is not.

    Attributes:
        url: of the checkpoint; of the run, where it failed.
        seconds: that it took.
        error: ``""`` where it did not fail.
    """

    url: str
    seconds: float
    error: str = ""


class Mirror:
    """Uploads from one process, in a thread of its own.

    Args:
        url: of the run.
        limit: how many checkpoints stay there; ``None``: all.
    """

    def __init__(self, url: str, limit: int | None) -> None:
        self._url, self._limit = url, limit
        self._thread = ThreadPoolExecutor(1, "shardwise-mirror")
        self._uploading: Future[Mirrored] | None = None
        self._waiting: Path | None = None  # a folder of links
        self._failed: list[Mirrored] = []  # without an upload, since the last ``take``

    def add(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint, when the one before is done."""
        if self._waiting is not None:
            shutil.rmtree(self._waiting.parent, ignore_errors=True)
            self._waiting = None
        try:
            self._waiting = _linked(checkpoint)
        except OSError as error:  # it is gone, or the disk is full and has no links
            self._failed.append(Mirrored(self._url, 0.0, f"linking {checkpoint} failed: {error}"))
        self._start()

    def take(self, wait: bool = False) -> list[Mirrored]:
        """Return what was uploaded since the last call; ``wait`` for all."""
        done, self._failed = self._failed, []
        while (future := self._uploading) is not None and (wait or future.done()):
            done.append(future.result())
            self._uploading = None
            self._start()
        return done

    def _start(self) -> None:
        if self._uploading is None and self._waiting is not None:
            self._uploading = self._thread.submit(self._upload, self._waiting)
            self._waiting = None

    def _upload(self, links: Path) -> Mirrored:
        began = time.perf_counter()
        try:
            url, error = upload(links, self._url, self._limit).url, ""
        except CheckpointError as failure:
            url, error = self._url, str(failure)
        shutil.rmtree(links.parent, ignore_errors=True)
        return Mirrored(url, time.perf_counter() - began, error)


def remove_unfinished(checkpoints: Path, kind: str) -> None:
    """Remove what a run that was killed was uploading (``"mirror"``), or fetching (``"download"``).

    Links would keep their files for ever, and no download of what the mirror had then goes on.
    """
    for hidden in checkpoints.glob(f".*.{kind}"):
        shutil.rmtree(hidden, ignore_errors=True)


def _linked(checkpoint: Path) -> Path:
    """A hidden folder beside a checkpoint, with links to its files under its own name."""
    hidden = checkpoint.parent / f".{checkpoint.name}.mirror"
    try:
        shutil.copytree(checkpoint, hidden / checkpoint.name, copy_function=_link)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return hidden / checkpoint.name


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no hard links (exFAT, a bucket)."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
