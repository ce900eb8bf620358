"""The folder of one run: its files, its lock, and the replacement of an earlier run.

Each file is written under a temporary name and renamed, so a crash leaves no partial file. A lock
file keeps a second run from writing to the same folder; the system releases it with the process.

    run/
      recipe.yaml  metrics.jsonl  step.json …         during the run
      checkpoints/step-100  checkpoints/latest        to resume from
      model.safetensors  config.json  loss.png …      at the end
      adapter/                                        in place of a model that has an adapter
      save  stop                                      requests, made by the user
      replaced-1/                                     an earlier run, until this one has saved
      .replacing/                                     an earlier run that is being moved

Nothing in the folder changes until the start is known to be valid. An earlier run is moved, and
removed when the run that replaces it has saved its first checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.disk import MODE, make_folder
from shardwise.checkpoint.folder import checkpoints, remove, remove_stale_partials
from shardwise.checkpoint.recognise import LATEST, is_broken
from shardwise.convert.export import FROM_A_RUN
from shardwise.errors import ConfigError

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
STEP = "step.json"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"  # as peft writes it
LOCK = ".lock"
# Metrics first: a partly moved run must not look like a finished one.
RESULTS = (
    *(METRICS, STEP, "train_results.json", "eval_results.json", "loss.png", "model.safetensors"),
    *(*FROM_A_RUN, "tokenizer.cache.json"),
)
REPLACING, REPLACED = ".replacing", "replaced-"
LOCK_TIMEOUT = 10.0  # seconds for which a run that is ending may still hold the lock


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Set ``path`` as the filename of an ``OSError``, which a full disk does not set."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def is_locked(path: Path) -> bool:
    """Test whether a process runs in the folder ``path``; it may be on another machine."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


class Folder:
    """A run's folder. Rank 0 has one, and before it the launcher."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: str | Path, timeout: float | None = None) -> Iterator[Folder]:
        """Create the folder if needed, and lock it for the block.

        A replacement of an earlier run that a crash interrupted is undone. A folder that was
        created here is removed if nothing was written to it.

        Raises:
            ConfigError: another process holds the lock for more than ``timeout`` seconds (10).
        """
        folder = cls(Path(path).expanduser())
        is_new = not folder.path.exists()
        lock = _open_locked(folder.path, LOCK_TIMEOUT if timeout is None else timeout)
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
    def launch_id(self) -> str:
        """The run id of the launcher that started this run, or ``""``."""
        return self.read_text(LOCK) or ""

    @launch_id.setter
    def launch_id(self, name: str) -> None:
        with errors_naming(self.path / LOCK):
            (self.path / LOCK).write_text(name, "utf-8")

    # ---- one run after another ---------------------------------------------------------------

    @contextlib.contextmanager
    def replacing_run(self) -> Iterator[None]:
        """Move an earlier run to ``replaced-N``; the block writes the new run's first files.

        After an error, or a crash at any moment, the earlier run is restored.

        Raises:
            ConfigError: the folder of its checkpoints is a link, which cannot be moved.
        """
        if self.checkpoints.is_symlink():
            raise ConfigError(
                f"{self.checkpoints} is a link, so its run cannot be moved to make place for a "
                "new one. Remove its checkpoints yourself, or name another folder with "
                "--run.folder."
            )
        replaced_run = self.path / REPLACING
        replaced_run.mkdir()
        with Folder(replaced_run).atomic_write(RECIPE) as copy:  # the folder always has a recipe
            shutil.copyfile(self.path / RECIPE, copy)
        try:
            for name in (*RESULTS, ADAPTER, CHECKPOINTS):
                if (self.path / name).exists():
                    (self.path / name).rename(replaced_run / name)
            yield
        except BaseException:
            self.restore()
            raise
        replaced_run.rename(self._replaced_path())

    def restore(self) -> None:
        """Undo an interrupted ``replacing_run``, if there is one."""
        replaced_run = self.path / REPLACING
        for path in sorted(replaced_run.iterdir()) if replaced_run.is_dir() else []:
            path.rename(self.path / path.name)
        with contextlib.suppress(FileNotFoundError):
            replaced_run.rmdir()

    def remove_replaced(self) -> None:
        """Remove the runs that this one replaces; other files in their folders stay."""
        for path in sorted(self.path.glob(f"{REPLACED}[0-9]*")):
            for name in (*RESULTS, RECIPE):
                (path / name).unlink(missing_ok=True)
            shutil.rmtree(path / ADAPTER, ignore_errors=True)
            _remove_checkpoints(path / CHECKPOINTS)
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()

    def remove_unfinished(self, name: str) -> None:
        """Remove what killed attempts to write ``name``, or checkpoints, have left here."""
        remove_stale_partials(self.checkpoints)
        for path in self.path.glob(f".{name}.unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _replaced_path(self) -> Path:
        number = 1
        while (path := self.path / f"{REPLACED}{number}").exists():
            number += 1
        return path

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        with self.atomic_write(name) as path:
            path.write_bytes(content)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def read_text(self, name: str) -> str | None:
        """The file's text, or ``None`` if it does not exist or is not UTF-8."""
        try:
            return (self.path / name).read_text("utf-8")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    @contextlib.contextmanager
    def atomic_write(self, name: str) -> Iterator[Path]:
        """A temporary path; it is renamed to ``name`` if the block ends without an error."""
        target = self.path / name
        temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        try:
            with errors_naming(target):
                yield temporary
                temporary.replace(target)
        finally:
            with contextlib.suppress(OSError):  # the error that led here says more
                temporary.unlink(missing_ok=True)


def _remove_checkpoints(folder: Path) -> None:
    if not folder.is_dir():
        return
    (folder / LATEST).unlink(missing_ok=True)
    broken = [path for path in folder.iterdir() if is_broken(path.name)]
    for path in (*checkpoints(folder), *broken):
        if (path / "manifest.json").is_file():
            remove(path)
    remove_stale_partials(folder)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


def _open_locked(path: Path, timeout: float) -> int:
    """Lock the folder; again if the lock file was removed with its folder while waiting."""
    deadline = time.monotonic() + timeout
    while True:
        make_folder(path)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, MODE)
        try:
            _acquire(lock, path, deadline)
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


def _acquire(lock: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"run.folder {path} is in use by another process; name another folder with "
                    "--run.folder, or end that process."
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
        else:
            return
