"""The folder of one run: what may be written there, and how.

A run that dies while writing must not leave half a file under a whole file's name, so each
file is written beside its place and renamed into it. And a second run must not mix its
files with the first one's, so a folder that is in use is refused, or its results are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import ConfigError

__all__ = ["RECIPE", "Folder"]

RECIPE = "recipe.yaml"
RESULTS = (
    "metrics.jsonl",
    "loss.png",
    "model.safetensors",
    "config.json",
    "generation_config.json",
)


class Folder:
    """An open run folder. Only rank 0 holds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path, overwrite: bool) -> Folder:
        """Create the folder, or take it over from an earlier run.

        Raises:
            ConfigError: it is in use and ``overwrite`` is false, or what it holds is no run.
        """
        path = Path(path).expanduser()
        check(path, overwrite)
        path.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (path / name).unlink(missing_ok=True)
        return cls(path)

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


def check(path: str | Path, overwrite: bool) -> None:
    """Whether a run may write to ``path``; writes nothing.

    Raises:
        ConfigError: as ``Folder.open``.
    """
    path = Path(path).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.folder {path} is a file; name a folder.")
    # Hidden files do not count: a run that was killed while writing may have left one.
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    entries = sorted(name for name in names if not name.startswith("."))
    if not entries:
        return
    if RECIPE not in entries:
        raise ConfigError(
            f"run.folder {path} holds {len(entries)} entries ({', '.join(entries[:3])}, …) and no "
            f"{RECIPE}, so it is not an earlier run and is left alone; name another folder."
        )
    if not overwrite:
        raise ConfigError(
            f"run.folder {path} holds an earlier run; name another folder with --run.folder, or "
            "replace that run with --run.overwrite true."
        )
