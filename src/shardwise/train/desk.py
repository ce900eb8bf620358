"""What rank 0 writes to and speaks through; on the other ranks, nothing.

Every rank walks through the same calls in the same order, since most are collectives; that
only rank 0 speaks and writes is decided here, and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue

from shardwise.comm.protocol import Comm
from shardwise.errors import RanksDisagree
from shardwise.train.config import Recipe
from shardwise.train.exchange import text_from_rank_0
from shardwise.train.folder import JOURNAL, RECIPE, Folder
from shardwise.train.journal import Journal
from shardwise.train.metrics import Busy, Emit, Finished, Record, Saved, Warned
from shardwise.train.recipe import resolved
from shardwise.train.requests import Ask, TouchFiles
from shardwise.train.start import FIRST, Attempt, Start, check_ours, decide

__all__ = ["Desk"]

Heard = SimpleQueue[tuple[Warned, bool]]  # and whether it is told already
LONG = 2.0  # seconds that something takes before it is said what takes so long


class Desk:
    """One rank's; see above. Use ``opened``."""

    def __init__(
        self,
        recipe: Recipe,
        attempt: Attempt,
        emit: Emit,
        folder: Folder | None,
        heard: Heard,
    ) -> None:
        self.folder = folder
        self._recipe, self._attempt = recipe, attempt
        self._emit, self._heard = emit, heard
        if folder is not None:
            self.journal = Journal(folder.path / JOURNAL)
            self._touched = TouchFiles(folder.path)
            self._touched.seen()  # what is there already was meant for a run that is over

    @classmethod
    @contextmanager
    def opened(
        cls, recipe: Recipe, comm: Comm, emit: Emit, attempt: Attempt = FIRST
    ) -> Iterator[tuple[Desk, Start]]:
        """The desk, and how the run begins. A collective that changes nothing in the folder.

        Raises:
            ConfigError: on rank 0, as ``decide`` and ``Folder.held``.
        """
        if comm.rank:
            desk = cls(recipe, attempt, emit, None, SimpleQueue())
            yield desk, Start(text_from_rank_0(comm, None, "beginning"))
            return
        check_ours(recipe)  # or making the folder and its lock would leave a trace
        with Folder.held(recipe.run.folder) as folder, _overheard(emit) as heard:
            again = attempt.number > 0 and folder.launch == attempt.launch
            start = decide(recipe, restarted=again)
            text_from_rank_0(comm, start.value, "beginning")
            desk = cls(recipe, attempt, emit, folder, heard)
            try:
                yield desk, start
            except RanksDisagree:
                raise  # what was heard last only follows from it
            except BaseException:
                desk.say(None)
                raise
            desk.say(None)

    def say(self, record: Record | None) -> None:
        """Tell and record it, after what the engine has warned of since the last time."""
        if self.folder is None:
            return
        while True:
            try:
                warned, is_told = self._heard.get_nowait()
            except Empty:
                break
            self.journal(warned)
            if not is_told:
                self._emit(warned)
        if record is not None:
            self.journal(record)
            self._emit(record)
        if isinstance(record, Saved | Finished):
            self._drop_replaced()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, ``what`` is done; tells so once if it takes long, and does not record it."""
        timer = threading.Timer(LONG, self._emit, [Busy(what, LONG)])
        timer.daemon = True
        if self.folder is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _drop_replaced(self) -> None:
        assert self.folder is not None  # it has just said something
        try:
            self.folder.drop_replaced()
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            self.say(Warned(f"the run that this one replaces stays: {why}"))

    def sync(self) -> None:
        """Return when what was recorded is on the disk."""
        if self.folder is not None:
            self.journal.sync()

    def begin(self, start: Start, after: int, files: Mapping[str, str]) -> None:
        """Everything is proven: from here on the folder is this run's, and what is said recorded.

        Args:
            start: afresh, in place of a run that may be there, or on with it.
            after: the step that it goes on from.
            files: of the tokenizer, by name.
        """
        if (folder := self.folder) is None:
            return
        replaces = start is Start.AFRESH and folder.has(RECIPE)
        with folder.replacing_run() if replaces else nullcontext():
            folder.write_text(RECIPE, resolved(self._recipe))
            for name, text in files.items():
                folder.write_text(name, text)
            self.journal.begin(after)
        folder.launch = self._attempt.launch
        self.done()

    def asked(self) -> Ask:
        """What files in the folder ask for."""
        return Ask.NOTHING if self.folder is None else self._touched.seen()

    def done(self) -> None:
        """What files asked for is done."""
        if self.folder is not None and (trouble := self._touched.forget()):
            self.say(Warned(trouble))


class _Ears(logging.Handler):
    """Warnings of the engine, for the next time that something is said.

    Those of another thread are told at once: this one may be waiting, and they say for whom.
    """

    def __init__(self, tell: Emit) -> None:
        super().__init__(logging.WARNING)
        self.heard: Heard = SimpleQueue()
        self._tell, self._thread = tell, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        warned, is_told = Warned(record.getMessage()), record.thread != self._thread
        self.heard.put((warned, is_told))
        if is_told:
            self._tell(warned)


@contextmanager
def _overheard(tell: Emit) -> Iterator[Heard]:
    """The engine's warnings; without this they would go to stderr, and into no record."""
    ears, log = _Ears(tell), logging.getLogger("shardwise")
    log.addHandler(ears)
    try:
        yield ears.heard
    finally:
        log.removeHandler(ears)
