"""The folder of one run: what may be written there, and how.

A run that dies while writing must not leave half a file under a whole file's name, so each
file is written beside its place and renamed into it. And two runs must not write to one folder,
so whoever writes holds a lock on it, which ends with the process however that ends.

    run/
      recipe.yaml  metrics.jsonl  tokenizer.json …    as they come
      checkpoints/step-100  checkpoints/latest        to go on from
      model.safetensors  config.json  loss.png …      at the end
      save  stop                                      made by the user, to ask for it
      replaced-1/                                     an earlier run, until this one has saved
      .replacing/                                     an earlier run that is just being moved

Nothing here changes until a start is proven valid, and an earlier run that is to be replaced is
moved, not removed: it goes when the run that replaces it has saved its first good state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.disk import MODE, make_folder
from shardwise.checkpoint.folder import LATEST, remove, remove_stale_partials, steps
from shardwise.errors import ConfigError

__all__ = ["CHECKPOINTS", "JOURNAL", "RECIPE", "Folder", "kept", "named"]

RECIPE = "recipe.yaml"
JOURNAL = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
# The journal first: a run that is half moved must not look like a finished one.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.cache.json")
RESULTS = (
    JOURNAL,
    "loss.png",
    "model.safetensors",
    "config.json",
    "generation_config.json",
    *TOKENIZER,
)
REPLACING, REPLACED = ".replacing", "replaced-"
PATIENCE = 10.0  # seconds for which a run that is just ending may still hold the folder


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """An ``OSError`` inside names ``path``: where a disk is full, the system names nothing."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def kept(path: Path, name: str) -> Path:
    """The file ``name`` of the run in ``path``, also where a crash left it half moved."""
    moved = path / REPLACING / name
    return moved if moved.exists() else path / name


class Folder:
    """A run's folder. Only rank 0 holds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def held(cls, path: str | Path, patience: float | None = None) -> Iterator[Folder]:
        """The folder, made if need be, and nobody else's while the block lasts.

        A replacement of an earlier run that a crash interrupted is undone; a folder that is made
        here, and in which nothing is written, goes again.

        Raises:
            ConfigError: another process holds it, for longer than ``patience`` seconds (10).
        """
        folder = cls(Path(path).expanduser())
        is_new = not folder.path.exists()
        lock = _locked(folder.path, PATIENCE if patience is None else patience)
        try:
            folder.restore()
            yield folder
        finally:
            if is_new:
                _remove_empty(folder.path)
            os.close(lock)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def launch(self) -> str:
        """What began the run here: the name that its launcher gave, or ``""``."""
        return self.read_text(LOCK) or ""

    @launch.setter
    def launch(self, name: str) -> None:
        with named(self.path / LOCK):
            (self.path / LOCK).write_text(name, "utf-8")

    # ---- one run after another ---------------------------------------------------------------

    @contextlib.contextmanager
    def replacing_run(self) -> Iterator[None]:
        """Move an earlier run to ``replaced-N``; the block writes what the new one begins with.

        After an error, and after a crash at any moment, the earlier run is where it was.

        Raises:
            ConfigError: its checkpoints lie behind a link, which would not lead there any more.
        """
        if self.checkpoints.is_symlink():
            raise ConfigError(
                f"{self.checkpoints} is a link, so the run there cannot be moved aside for "
                "a new one. Remove its checkpoints yourself, or name another folder with "
                "--run.folder."
            )
        moved = self.path / REPLACING
        moved.mkdir()
        with Folder(moved).replacing(RECIPE) as copy:  # the folder itself is never without one
            shutil.copyfile(self.path / RECIPE, copy)
        try:
            for name in (*RESULTS, CHECKPOINTS):
                if (self.path / name).exists():
                    (self.path / name).rename(moved / name)
            yield
        except BaseException:
            self.restore()
            raise
        moved.rename(self._free(REPLACED))

    def restore(self) -> None:
        """Move a run back that was about to be replaced, if there is one."""
        moved = self.path / REPLACING
        for path in sorted(moved.iterdir()) if moved.is_dir() else []:
            path.rename(self.path / path.name)
        with contextlib.suppress(FileNotFoundError):
            moved.rmdir()

    def drop_replaced(self) -> None:
        """Remove the runs that this one replaces, and nothing else that lies with them."""
        for path in sorted(self.path.glob(f"{REPLACED}[0-9]*")):
            for name in (*RESULTS, RECIPE):
                (path / name).unlink(missing_ok=True)
            _remove_checkpoints(path / CHECKPOINTS)
            with contextlib.suppress(OSError):  # something else is in it
                path.rmdir()

    def _free(self, prefix: str) -> Path:
        number = 1
        while (path := self.path / f"{prefix}{number}").exists():
            number += 1
        return path

    def write_text(self, name: str, text: str) -> None:
        with self.replacing(name) as path:
            path.write_text(text, "utf-8")

    def write_json(self, name: str, value: object) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

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
            with named(place):
                yield temporary
                temporary.replace(place)
        finally:
            with contextlib.suppress(OSError):  # the error that led here says more
                temporary.unlink(missing_ok=True)


def _remove_checkpoints(folder: Path) -> None:
    if not folder.is_dir():
        return
    (folder / LATEST).unlink(missing_ok=True)
    for path in steps(folder):
        if (path / "manifest.json").is_file():
            remove(path)
    remove_stale_partials(folder)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _locked(path: Path, patience: float) -> int:
    """The folder's lock, held; it may go with its folder while it is waited for."""
    until = time.monotonic() + patience
    while True:
        make_folder(path)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, MODE)
        try:
            _acquire(lock, path, until)
            if os.path.samestat(os.fstat(lock), (path / LOCK).stat()):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        if os.listdir(path) == [LOCK]:  # noqa: PTH208 - names alone
            (path / LOCK).unlink()
            path.rmdir()


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
