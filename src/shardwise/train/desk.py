"""What rank 0 writes to and speaks through; on the other ranks, nothing.

Every rank walks through the same calls in the same order, since most are collectives; that
only rank 0 speaks and writes is decided here, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from shardwise.comm.protocol import Comm
from shardwise.errors import RanksDisagree
from shardwise.train.config import Recipe
from shardwise.train.exchange import text_from_rank_0
from shardwise.train.folder import JOURNAL, RECIPE, Folder
from shardwise.train.journal import Journal
from shardwise.train.metrics import Emit, Record, Warned
from shardwise.train.recipe import resolved
from shardwise.train.requests import Ask, TouchFiles
from shardwise.train.start import Start, decide

__all__ = ["Desk", "take_over"]


class Desk:
    """One rank's; see above. Use ``opened``."""

    def __init__(self, emit: Emit, folder: Folder | None, heard: SimpleQueue[str]) -> None:
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
        with Folder.held(recipe.run.folder) as folder, _overheard() as heard:
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
                self._say(Warned(self._heard.get_nowait()))
            except Empty:
                break
        if record is not None:
            self._say(record)

    def _say(self, record: Record) -> None:
        self.journal(record)
        self._emit(record)

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
    """Warnings of the engine, for the next time that something is said: it may be a thread's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: SimpleQueue[str] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.put(record.getMessage())


@contextmanager
def _overheard() -> Iterator[SimpleQueue[str]]:
    """The engine's warnings; without this they would go to stderr, and into no record."""
    ears, log = _Ears(), logging.getLogger("shardwise")
    log.addHandler(ears)
    try:
        yield ears.heard
    finally:
        log.removeHandler(ears)
