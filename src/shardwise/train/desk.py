"""What rank 0 writes to and speaks through; on the other ranks, nothing.

Every rank walks through the same calls in the same order, since most are collectives; that
only rank 0 speaks and writes is decided here, and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from shardwise.comm.protocol import Comm
from shardwise.errors import RanksDisagree
from shardwise.train.config import Recipe
from shardwise.train.exchange import text_from_rank_0
from shardwise.train.folder import JOURNAL, RECIPE, Folder
from shardwise.train.journal import Journal
from shardwise.train.metrics import Busy, Emit, Record, Warned
from shardwise.train.recipe import resolved
from shardwise.train.requests import Ask, TouchFiles
from shardwise.train.start import Start, decide

__all__ = ["Desk", "take_over"]

Heard = SimpleQueue[tuple[Warned, bool]]  # and whether it is told already
LONG = 2.0  # seconds that something takes before it is said what takes so long


class Desk:
    """One rank's; see above. Use ``opened``."""

    def __init__(self, emit: Emit, folder: Folder | None, heard: Heard) -> None:
        self.folder = folder
        self._emit, self._heard = emit, heard
        if folder is not None:
            self.journal = Journal(folder.path / JOURNAL)
            self._touched = TouchFiles(folder.path)

    @classmethod
    @contextmanager
    def opened(cls, recipe: Recipe, comm: Comm, emit: Emit) -> Iterator[tuple[Desk, Start]]:
        """The desk, and how the run begins. A collective.

        Raises:
            ConfigError: on rank 0, as ``decide`` and ``Folder.held``.
        """
        if comm.rank:
            yield cls(emit, None, SimpleQueue()), Start(text_from_rank_0(comm, None, "beginning"))
            return
        decide(recipe)  # first without a trace: the folder may be another's
        with Folder.held(recipe.run.folder) as folder, _overheard(emit) as heard:
            start = decide(recipe)
            if start is not Start.FINISHED:
                _begin(folder, recipe, start)
            text_from_rank_0(comm, start.value, "beginning")
            desk = cls(emit, folder, heard)
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

    def sync(self) -> None:
        """Return when what was recorded is on the disk."""
        if self.folder is not None:
            self.journal.sync()

    def begin(self, after: int) -> None:
        """The run begins after step ``after``: from here on, what is said is recorded.

        Checkpoints of later steps are broken, or one of them would have been loaded.
        """
        if self.folder is None:
            return
        for old, new in self.folder.set_aside(after):
            self.say(Warned(f"{old} is called {new} now, to be looked at or removed."))
        self.journal.begin(after)

    def asked(self) -> Ask:
        """What files in the folder ask for."""
        return Ask.NOTHING if self.folder is None else self._touched.seen()

    def done(self) -> None:
        """What files asked for is done."""
        if self.folder is not None and (trouble := self._touched.forget()):
            self.say(Warned(trouble))


def take_over(recipe: Recipe) -> None:
    """Replace an earlier run by one that is about to begin, if the recipe says so.

    A launcher does it once, before it starts ranks: ranks that are started again must go on with
    what they find. May raise ``ConfigError``.
    """
    with Folder.held(recipe.run.folder) as folder:
        _begin(folder, recipe, decide(recipe))


def _begin(folder: Folder, recipe: Recipe, start: Start) -> None:
    if start is Start.AFRESH:
        folder.clear()
    folder.write_text(RECIPE, resolved(recipe))
    asked = TouchFiles(folder.path)
    asked.seen()
    asked.forget()  # it was meant for a run that is over


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
