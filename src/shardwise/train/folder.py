"""The folder of one run: what may be written there, and how.

A run that dies while writing must not leave half a file under a whole file's name, so each
file is written beside its place and renamed into it. And two runs must not write to one folder,
so whoever writes holds a lock on it, which ends with the process however that ends.

    run/
      recipe.yaml  metrics.jsonl  tokenizer.json …    as they come
      checkpoints/step-100  checkpoints/latest        to go on from
      model.safetensors  config.json  loss.png …      at the end
      save  stop                                      made by the user, to ask for it
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.folder import LATEST, remove, steps, sweep
from shardwise.errors import ConfigError

__all__ = ["CHECKPOINTS", "JOURNAL", "RECIPE", "Folder"]

RECIPE = "recipe.yaml"
JOURNAL = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
RESULTS = (JOURNAL, "loss.png", "model.safetensors", "config.json", "generation_config.json")
PATIENCE = 10.0  # seconds for which a run that is just ending may still hold the folder


class Folder:
    """A run's folder. Only rank 0 holds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def held(cls, path: str | Path, patience: float | None = None) -> Iterator[Folder]:
        """The folder, made if need be, and nobody else's while the block lasts.

        Raises:
            ConfigError: another process holds it, for longer than ``patience`` seconds (10).
        """
        patience = PATIENCE if patience is None else patience
        folder = cls(Path(path).expanduser())
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _acquire(lock, folder.path, time.monotonic() + patience)
            yield folder
        finally:
            os.close(lock)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def clear(self) -> None:
        """Remove an earlier run's results and checkpoints, and nothing else that is there.

        ``recipe.yaml`` stays until another is written: without it, what an interrupted removal
        leaves would look like no run at all. The tokenizer stays for the next run.
        """
        for name in RESULTS:
            (self.path / name).unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            (self.checkpoints / LATEST).unlink(missing_ok=True)
            for path in steps(self.checkpoints):
                if (path / "manifest.json").is_file():
                    remove(path)
            sweep(self.checkpoints)
            self.set_aside(-1)
            with contextlib.suppress(OSError):  # something else is in it
                self.checkpoints.rmdir()

    def set_aside(self, after: int) -> list[tuple[str, str]]:
        """Rename checkpoints of later steps, which are broken, so that new ones find their place.

        Returns:
            Old and new names.
        """
        renamed = []
        for path in steps(self.checkpoints) if self.checkpoints.is_dir() else []:
            if int(path.name.removeprefix("step-")) > after:
                number = 1
                while (place := path.with_name(f"broken-{path.name}-{number}")).exists():
                    number += 1
                path.rename(place)
                renamed.append((path.name, place.name))
        return renamed

    def write_text(self, name: str, text: str) -> None:
        with self.replacing(name) as path:
            path.write_text(text, "utf-8")

    def write_json(self, name: str, value: object) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_text(self, name: str) -> str | None:
        """The file's text, or ``None`` where there is none."""
        try:
            return (self.path / name).read_text("utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A path to write to; it becomes ``name`` if the block ends without an error."""
        place = self.path / name
        temporary = place.with_name(f".{place.stem}.{os.getpid()}{place.suffix}")
        try:
            yield temporary
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)


def _acquire(lock: int, path: Path, until: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ConfigError(
                    f"run.folder {path} is in use by another process; name another folder with "
                    "--run.folder, or end that process."
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
        else:
            return
