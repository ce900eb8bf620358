"""The run's folder, metrics log and output, on rank 0; a no-op on the other ranks.

Every rank makes the same calls in the same order, since most are collectives. Only this file
decides that rank 0 alone logs and writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue

from shardwise.checkpoint.collectives import broadcast_object
from shardwise.comm.protocol import Comm
from shardwise.errors import RanksDisagree
from shardwise.recipe.read import to_yaml
from shardwise.recipe.recipe import Recipe
from shardwise.train.folder import METRICS, RECIPE, Folder
from shardwise.train.metrics_log import MetricsLog
from shardwise.train.records import Busy, Emit, Finished, Record, Replaced, Saved, Warned
from shardwise.train.requests import FileRequests, Request
from shardwise.train.start import (
    FIRST_ATTEMPT,
    Attempt,
    Start,
    decide_start,
    finished_steps,
    holds_run,
)
from shardwise.train.trackers import Trackers

WarningQueue = SimpleQueue[tuple[Warned, bool]]  # and whether it was already emitted
BUSY_AFTER = 2.0  # seconds


class RunLogger:
    """The logger of one rank; see above. Open it with ``open_run``."""

    def __init__(
        self,
        recipe: Recipe,
        attempt: Attempt,
        emit: Emit,
        folder: Folder | None,
        warnings: WarningQueue,
    ) -> None:
        self.folder = folder
        self._recipe, self._attempt = recipe, attempt
        self._emit, self._warnings = emit, warnings
        if folder is not None:
            self.metrics_log = MetricsLog(folder.path / METRICS)
            self._trackers = Trackers(recipe.logging, folder.path, self.log)
            self._file_requests = FileRequests(folder.path)
            self._file_requests.poll()  # existing files were meant for an earlier run

    @classmethod
    @contextmanager
    def open_run(
        cls, recipe: Recipe, comm: Comm, emit: Emit, attempt: Attempt = FIRST_ATTEMPT
    ) -> Iterator[tuple[RunLogger, Start]]:
        """The logger, and how the run starts. A collective that changes nothing in the folder.

        Raises:
            ConfigError: on rank 0, by ``decide_start`` and ``Folder.locked``.
        """
        if comm.rank:
            logger = cls(recipe, attempt, emit, None, SimpleQueue())
            yield logger, Start(broadcast_object(comm, "", "beginning"))
            return
        holds_run(recipe)  # raises before the folder and its lock are created
        with Folder.locked(recipe.run.folder) as folder, _captured_warnings(emit) as warnings:
            restarted = attempt.number > 0 and folder.launch_id == attempt.launch_id
            start = decide_start(recipe, restarted=restarted)
            broadcast_object(comm, start.value, "beginning")
            logger = cls(recipe, attempt, emit, folder, warnings)
            try:
                yield logger, start
            except RanksDisagree:
                raise  # the last warnings are only its consequences
            except BaseException:
                logger.log(None)
                raise
            finally:
                logger._trackers.close()
            logger.log(None)

    def log(self, record: Record | None) -> None:
        """Emit and record warnings of the engine since the last call, then ``record``."""
        if self.folder is None:
            return
        while True:
            try:
                warned, is_emitted = self._warnings.get_nowait()
            except Empty:
                break
            self.metrics_log(warned)
            if not is_emitted:
                self._emit(warned)
        if record is not None:
            self.metrics_log(record)
            self._emit(record)
            self._trackers.log(record)
        if isinstance(record, Saved | Finished):
            self._remove_replaced()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Emit ``Busy`` once if the block takes longer than ``BUSY_AFTER``; not recorded."""
        timer = threading.Timer(BUSY_AFTER, self._emit, [Busy(what, BUSY_AFTER)])
        timer.daemon = True
        if self.folder is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _remove_replaced(self) -> None:
        assert self.folder is not None  # only rank 0 calls this
        try:
            self.folder.remove_replaced()
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            self.log(Warned(f"the run that this one replaces could not be removed: {reason}"))

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, over all its attempts; 0 on the other ranks."""
        return 0.0 if self.folder is None else self.metrics_log.elapsed

    def sync(self) -> None:
        """Flush the metrics log to the disk."""
        if self.folder is not None:
            self.metrics_log.sync()

    def start_run(self, start: Start, step: int, files: Mapping[str, str]) -> None:
        """Take over the folder for this run, and start the metrics log.

        Args:
            start: new, which replaces an earlier run, or resumed.
            step: the step that the run resumes from.
            files: of the tokenizer, by name.
        """
        if (folder := self.folder) is None:
            return
        is_replaced = start is Start.NEW and folder.has(RECIPE)
        earlier = Replaced(self._recipe.run.folder, finished_steps(folder.path))
        with folder.replacing_run() if is_replaced else nullcontext():
            folder.write_text(RECIPE, to_yaml(self._recipe))
            for name, text in files.items():
                folder.write_text(name, text)
            self.metrics_log.start(step)
        self.log(earlier if is_replaced else None)
        self._trackers.open()
        folder.launch_id = self._attempt.launch_id
        self.clear_requests()

    def requested(self) -> Request:
        """The request of files in the folder."""
        return Request.NONE if self.folder is None else self._file_requests.poll()

    def clear_requests(self) -> None:
        """Remove the files whose request was handled."""
        if self.folder is not None and (trouble := self._file_requests.remove_handled()):
            self.log(Warned(trouble))


class _WarningHandler(logging.Handler):
    """Queues warnings of the engine for the next ``log``.

    Warnings of other threads are emitted at once: this thread may be waiting for the rank that
    they name.
    """

    def __init__(self, emit: Emit) -> None:
        super().__init__(logging.WARNING)
        self.queue: WarningQueue = SimpleQueue()
        self._emit, self._thread = emit, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        warned, is_emitted = Warned(record.getMessage()), record.thread != self._thread
        self.queue.put((warned, is_emitted))
        if is_emitted:
            self._emit(warned)


@contextmanager
def _captured_warnings(emit: Emit) -> Iterator[WarningQueue]:
    """Warnings of the engine; without this they would go to stderr and not be recorded."""
    handler, log = _WarningHandler(emit), logging.getLogger("shardwise")
    log.addHandler(handler)
    try:
        yield handler.queue
    finally:
        log.removeHandler(handler)
