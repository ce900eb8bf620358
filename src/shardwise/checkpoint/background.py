"""Saving while training goes on: a thread writes the values that the state had at the call.

    main thread   begin · exchange edges    forward, backward   copy the rest · step      step
    writer                                  copy and write ─────────── sync ─ part
    rank 0's writer                         copy and write ─────────── sync ─ parts of all ─ publish

``staging`` draws who copies what when.

The writers never use the comm, which belongs to the steps: they leave their parts as files in the
folder that is being written. At each optimizer step the ranks exchange their states. So an error on
one rank is raised on all ranks at the next step, before parameters change.
"""

from __future__ import annotations

import atexit
import logging
import time
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread

import torch

from shardwise.checkpoint.collectives import (
    all_gather_object,
    await_parts,
    broadcast_object,
    joined_message,
    leave_part,
)
from shardwise.checkpoint.disk import explained, host, text_of
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.options import MakeRequest, Saved
from shardwise.checkpoint.save import Task, begin, check_shared, finish, give_up
from shardwise.checkpoint.staging import Copying, Pool, Watched, budget_of
from shardwise.checkpoint.writer import Part, Writer
from shardwise.comm.garbage import uncollected
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.watchdog.desync import format_ranks
from shardwise.comm.watchdog.waited import Waited
from shardwise.errors import CheckpointError
from shardwise.optim.sharded_model import ShardedModel

log = logging.getLogger("shardwise")

BUSY, DONE, FAILED, PUBLISHING = range(4)
GLANCE = 0.05  # seconds between two looks while all ranks wait


class Saving:
    """A save on its way. ``check`` and ``wait`` are collectives."""

    def __init__(self, task: Task, comm: Comm, pool: Pool, watched: Watched) -> None:
        self.path: Path = task.final
        self._task, self._comm, self._watched = task, comm, watched
        self._copying = Copying(task.contents.chunks(comm), pool)
        self._stream = _stream_beside(comm.device)
        self._start = time.perf_counter()
        self._begun = Event()  # else the thread, which begins to copy, keeps the caller waiting
        self._cancelled = Event()
        self._copied = Event()  # all is copied and nothing had changed; or ``_wrong`` is set
        self._wrong = ""  # why this rank cannot save
        self._has_left = False  # this rank's part is written
        self._ended = False  # this rank has written; rank 0 has published, too
        self._removed: tuple[str, ...] = ()
        self._saved: Saved | None = None
        self._busy: list[int] = []  # ranks that still wrote when all were asked last
        self.failure = ""  # what check() raised; it is raised again, and by no later save
        name = f"saving {task.final.name}, rank {comm.rank}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        atexit.register(self._at_exit)

    def check(self) -> Saved | None:
        """The report; ``None`` while any rank still writes.

        Raises:
            CheckpointError: on every rank, if any failed. Nothing is published; training can go on.
        """
        if self.failure:
            raise CheckpointError(self.failure)
        if self._saved is not None:
            return self._saved
        if self._copying.over.is_set():
            self.finish_copy()  # it costs nothing now, and the writer waits for it
        alive = self._thread.is_alive()  # first: the thread sets ``_wrong`` before it ends
        wrong = self._wrong or ("" if alive or self._ended else "its writer died")
        busy = PUBLISHING if self._has_left else BUSY
        mine = FAILED if wrong else busy if alive else DONE
        own = torch.tensor([mine], dtype=torch.uint8, device=self._comm.device)
        flags = self._comm.gather_rows(own, Label("agree", "saving")).flatten().tolist()
        # Rank 0 publishes, and waits for the parts of the others before.
        self._busy = [rank for rank, state in enumerate(flags) if state == BUSY] or [0]
        states = set(flags)
        if FAILED in states:
            self._fail(wrong)
        if states == {DONE}:
            atexit.unregister(self._at_exit)
            removed = broadcast_object(self._comm, self._removed, "what was removed")
            nbytes, seconds = self._task.contents.nbytes, time.perf_counter() - self._start
            self._saved = Saved(self.path, nbytes, seconds, tuple(removed))
        return self._saved

    def wait(self) -> Saved:
        """Return when it is complete. Raises as ``check`` does."""
        waited = Waited()
        while True:
            if self._thread.is_alive() and self._copied.is_set():
                self._thread.join(GLANCE)
            else:  # nothing changes while this thread waits, so the writer may copy
                self._copying.over.wait(GLANCE)
            if (saved := self.check()) is not None:
                return saved
            if waited.is_due() and self._comm.rank == 0:
                log.warning(
                    "all ranks have waited %.0f s for %s, which %s still writes: the disk there is "
                    "slow, or does not answer",
                    *(waited.seconds, self.path, format_ranks(self._busy)),
                )

    def begin(self) -> None:
        """Start to write."""
        try:
            self._thread.start()
        except RuntimeError as failure:  # check raises it, on all ranks
            self._go_wrong(failure)
            self._copied.set()
        finally:
            self._begun.set()

    def finish_copy(self) -> None:
        """Copy what is not copied yet: from now on, training may change everything. No collective.

        What goes wrong, ``check`` raises.
        """
        if self._copied.is_set():
            return
        try:
            self._copying.rest()
            self._wrong = self._wrong or self._watched.changed()
            hit("snapshot taken", self._comm.rank)
        except Exception as failure:  # noqa: BLE001 - check raises it, on all ranks
            self._go_wrong(failure)
        except BaseException:
            self._wrong = "it was interrupted"
            raise
        finally:
            self._copied.set()

    def _go_wrong(self, failure: BaseException) -> None:
        """Make ``check`` raise it on all ranks; an error of another class is logged in full."""
        if not isinstance(failure, CheckpointError):
            log.error("saving in the background", exc_info=failure)
        self._wrong = self._wrong or text_of(failure)

    def cancel(self) -> None:
        """Give it up on this rank: nothing is published, and what was written is removed."""
        self._stop()
        give_up(self._task)
        atexit.unregister(self._at_exit)

    def _stop(self) -> None:
        self._cancelled.set()
        self._copied.set()
        if self._thread.ident is None:
            self._copying.drain()
        else:
            self._thread.join(10.0)

    def _fail(self, wrong: str) -> None:
        self._stop()  # on every rank, before the folder goes
        texts = all_gather_object(self._comm, wrong, "why saving failed")
        give_up(self._task)
        atexit.unregister(self._at_exit)
        failed = {rank: text for rank, text in enumerate(texts) if text}
        if len(failed) > 1:  # rank 0's error may only repeat another rank's
            failed = {rank: text for rank, text in failed.items() if rank} or failed
        text = joined_message(failed, self._comm.size)
        self.failure = f"saving {self.path} in the background failed: {text}"
        raise CheckpointError(self.failure)

    def _at_exit(self) -> None:
        log.error(
            "%s was still being saved when this process ended, and is not complete; call wait() "
            "on the result of save_async() before the process ends",
            self.path,
        )

    # ---- on the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begun.wait()
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)
            self._leave(self._write())
            self._ended = True
        except BaseException as failure:  # noqa: BLE001 - the main thread raises it
            self._go_wrong(failure)
            self._copying.drain()
            with suppress(Exception):  # without it rank 0 waits until its patience ends
                self._leave(Part({}, self._wrong))

    def _write(self) -> Part:
        rank, contents = self._comm.rank, self._task.contents
        check_shared(self._task.folder)
        with (
            Writer(self._task.folder, rank, contents.total(rank), contents.block) as writer,
            closing(self._copying.chunks()) as chunks,
        ):
            for chunk in chunks:
                self._check_wanted()
                writer.write(chunk)
            part = writer.finish()
        self._copied.wait()
        self._check_wanted()
        return part

    def _check_wanted(self) -> None:
        if self._wrong or self._cancelled.is_set():
            raise CheckpointError(self._wrong or "it was given up")

    def _leave(self, part: Part) -> None:
        """Give this part to rank 0, which waits for all parts and publishes."""
        task = self._task
        with explained(f"writing checksums beside {task.folder.name}"):
            leave_part(task.folder, self._comm.rank, part)
        self._has_left = True
        if task.partial is not None and not part.error:
            parts = await_parts(task.folder, self._comm.size, self._cancelled)
            self._removed = finish(task, [Part.decode(some) for some in parts])


def _stream_beside(device: torch.device) -> torch.Stream | None:
    """Return a stream for copies on an accelerator, after it has waited for the current stream."""
    if device.type == "cpu":
        return None
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


class Background:
    """One model's saves in the background: at most one at a time."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._budget = 0  # of host memory, for a save that names none; 0: not asked for yet
        self.loaded_token = ""  # of the checkpoint that was loaded last, which no save removes

    @uncollected()
    def save(
        self, sharded: ShardedModel, make_request: MakeRequest, path: object, skips: bool
    ) -> Saving | None:
        """Start to save; ``None`` if one is under way and this one ``skips``."""
        comm = sharded.comm
        if skips and not self.check():
            if comm.rank == 0:
                log.warning("%s is not saved: the save before it is still being written", path)
            return None
        self.wait_pending()
        if not self._budget:
            self._budget = budget_of(all_gather_object(comm, host(), "hosts").count(host()))
        task = begin(sharded, make_request)
        budget = task.request.options.snapshot_bytes or self._budget
        pool = Pool(budget, pinned=comm.device.type != "cpu")
        saving = Saving(task, comm, pool, Watched(sharded, task.request.optimizers))
        try:
            saving.begin()
        except BaseException:
            saving.cancel()
            raise
        self._saving = saving
        return saving

    def check(self) -> bool:
        """Has every save ended? Raises the error of one that failed, once. A collective."""
        saving = self._taken()
        if saving is not None and saving.check() is None:
            self._saving = saving
        return self._saving is None

    def before_update(self) -> None:
        """Raise the error of a save that failed, once, before an update. A collective."""
        self.finish_copy()
        self.check()

    def finish_copy(self) -> None:
        """Parameters or optimizer state may change now. No collective."""
        if self._saving is not None:
            self._saving.finish_copy()

    def wait_pending(self) -> None:
        """Wait for the save that is under way. Raises its error, once. A collective."""
        saving = self._taken()
        if saving is not None:
            saving.wait()

    def _taken(self) -> Saving | None:
        saving, self._saving = self._saving, None
        return None if saving is None or saving.failure else saving
