"""To save while training goes on: on a thread of its own, which writes what was there at the call.

    main thread   begin · exchange edges · copy      step      step      step      step
    writer                              write ─────────── sync ─ part
    rank 0's writer                     write ─────────── sync ─ parts of all ─ publish

``staging`` draws what ``copied_by="next_step"`` makes of the copy.

The writers never use the comm, which belongs to the steps: they leave their parts as files in the
folder that is being written. How far they are, the ranks tell each other at each optimizer step,
so that an error on one is an error on all, within a step, and before parameters change again.
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
from shardwise.checkpoint.local_shards import ShardedModel
from shardwise.checkpoint.options import Saved, SaveRequest
from shardwise.checkpoint.save import Task, begin, finish, give_up
from shardwise.checkpoint.staging import Copying, Pool, Watched, budget_of
from shardwise.checkpoint.writer import Part, Writer
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError

log = logging.getLogger("shardwise")

BUSY, DONE, FAILED = range(3)
GLANCE = 0.05  # seconds between two looks while all ranks wait


class Saving:
    """A save on its way. ``check`` and ``wait`` are collectives."""

    def __init__(self, task: Task, comm: Comm, pool: Pool) -> None:
        self.path: Path = task.final
        self._task, self._comm, self._pool = task, comm, pool
        self._watched: Watched | None = None
        self._copying = Copying(task.contents.chunks(comm.rank), pool)
        self._stream: torch.Stream | None = None
        self._start = time.perf_counter()
        self._cancelled = Event()
        self._copied = Event()  # all of it, and nothing had changed; or ``_wrong`` says why not
        self._wrong = ""  # why it cannot be saved, here
        self._ended = False  # it was written, and published where that is this rank's task
        self._removed: tuple[str, ...] = ()
        self._saved: Saved | None = None
        self.failure = ""  # what check() raised; whoever waited for it knows, then
        name = f"saving {task.final.name}, rank {comm.rank}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        atexit.register(self._at_exit)

    def check(self) -> Saved | None:
        """Where it is: ``None`` while any rank still writes.

        Raises:
            CheckpointError: on every rank alike, if any failed. Nothing is published, and
                training can go on.
        """
        if self.failure:
            raise CheckpointError(self.failure)
        if self._saved is not None:
            return self._saved
        if self._copying.over.is_set():
            self.finish_copy()  # it costs nothing now, and the writer waits for it
        alive = self._thread.is_alive()  # first: what it says last, it says before it ends
        wrong = self._wrong or ("" if alive or self._ended else "its writer died")
        mine = FAILED if wrong else BUSY if alive else DONE
        flags = torch.zeros(self._comm.size, dtype=torch.uint8, device=self._comm.device)
        flags[self._comm.rank] = mine
        self._comm.all_gather(flags, Label("agree", "saving")).wait()
        states = set(flags.tolist())
        if FAILED in states:
            self._fail(wrong)
        if states == {DONE}:
            self._close()
            removed = broadcast_object(self._comm, self._removed, "what was removed")
            nbytes, seconds = self._task.contents.nbytes, time.perf_counter() - self._start
            self._saved = Saved(self.path, nbytes, seconds, tuple(removed))
        return self._saved

    def wait(self) -> Saved:
        """Return when it is complete. Raises as ``check`` does."""
        while True:
            if self._thread.is_alive() and self._copied.is_set():
                self._thread.join(GLANCE)
            else:  # the writer copies in its own time: while this thread waits, nothing changes
                self._copying.over.wait(GLANCE)
            if (saved := self.check()) is not None:
                return saved

    def begin(self, watched: Watched | None) -> None:
        """Start to write.

        Where training waits for the copy, writing begins when all is copied, since both want the
        processor; at once, where the copy has not enough room.

        Args:
            watched: what must not change until all is copied; ``None``: all is copied now.
        """
        if watched is not None:
            self._watched, self._stream = watched, _stream_beside(self._comm.device)
        elif self._task.contents.count(self._comm.rank) <= self._pool.largest_count:
            self.finish_copy()
        try:
            self._thread.start()
        except RuntimeError as failure:  # check raises it, on all ranks
            self._go_wrong(failure)
            self._copied.set()
        if watched is None:
            self.finish_copy()

    def finish_copy(self) -> None:
        """Copy what is not copied yet: from now on, training may change everything. No collective.

        What goes wrong, ``check`` raises.
        """
        if self._copied.is_set():
            return
        try:
            self._copying.rest()
            if self._watched is not None:
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
        """``check`` raises it, on all ranks; one that is not ours is logged in full."""
        if not isinstance(failure, CheckpointError):
            log.error("saving in the background", exc_info=failure)
        self._wrong = self._wrong or text_of(failure)

    def cancel(self) -> None:
        """Give it up, on this rank: nothing is published, and what was written goes."""
        self._stop()
        give_up(self._task)
        self._close()

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
        self._close()
        failed = {rank: text for rank, text in enumerate(texts) if text}
        # Rank 0 repeats what it heard from another; the other says it better.
        if len(failed) > 1:
            failed = {rank: text for rank, text in failed.items() if rank} or failed
        text = joined_message(failed, self._comm.size)
        self.failure = f"saving {self.path} in the background failed: {text}"
        raise CheckpointError(self.failure)

    def _close(self) -> None:
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        log.error(
            "%s was still being saved when this process ended, and is not complete; call wait() "
            "on what save_async() returned before you end",
            self.path,
        )

    # ---- on the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.accelerator.set_stream(self._stream)
            self._leave(self._write())
            self._ended = True
        except BaseException as failure:  # noqa: BLE001 - the main thread raises it
            self._go_wrong(failure)
            self._copying.drain()
            with suppress(Exception):  # else the others wait for it in vain, and then say so
                self._leave(Part({}, self._wrong))

    def _write(self) -> Part:
        rank = self._comm.rank
        with (
            Writer(self._task.folder, rank, self._task.contents.total(rank)) as writer,
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
        """Leave word of what was written; rank 0 waits for all, and publishes."""
        task = self._task
        with explained(f"leaving word of what was written in {task.folder.name}"):
            leave_part(task.folder, self._comm.rank, part)
        if task.partial is not None and not part.error:
            parts = await_parts(task.folder, self._comm.size, self._cancelled)
            self._removed = finish(task, [Part.decode(some) for some in parts])


def _stream_beside(device: torch.device) -> torch.Stream | None:
    """On an accelerator, a stream to copy on, that begins where the current one is now."""
    if device.type == "cpu":
        return None
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


class Background:
    """One model's saves in the background: at most one at a time, and the memory for it."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._pool: Pool | None = None
        self._ranks_here = 0  # of this host; 0: not counted yet

    def save(self, sharded: ShardedModel, request: SaveRequest) -> Saving | None:
        """Start to save; ``None`` if one is under way and ``when_busy`` is ``"skip"``."""
        options = request.options
        if options.when_busy == "skip" and not self.check():
            if sharded.comm.rank == 0:
                log.warning(
                    "%s is not saved: the save before it is still being written", request.path
                )
            return None
        self.wait_pending()
        comm = sharded.comm
        if not self._ranks_here:
            self._ranks_here = all_gather_object(comm, host(), "hosts").count(host())
        task = begin(sharded, request)
        saving = Saving(task, comm, self._memory(options.snapshot_bytes, task, comm.device))
        try:
            saving.begin(
                None if options.copied_by == "return" else Watched(sharded, request.optimizers)
            )
        except BaseException:
            saving.cancel()
            raise
        self._saving = saving
        return saving

    def check(self) -> bool:
        """Is nothing under way any more? Raises what went wrong, once. A collective."""
        saving = self._taken()
        if saving is not None and saving.check() is None:
            self._saving = saving
        return self._saving is None

    def finish_copy(self) -> None:
        """Parameters or optimizer state may change now. No collective."""
        if self._saving is not None:
            self._saving.finish_copy()

    def wait_pending(self) -> None:
        """Wait for what is under way. Raises what went wrong, once. A collective."""
        saving = self._taken()
        if saving is not None:
            saving.wait()

    def _taken(self) -> Saving | None:
        saving, self._saving = self._saving, None
        return None if saving is None or saving.failure else saving

    def _memory(self, asked: int | None, task: Task, device: torch.device) -> Pool:
        budget, block = asked or budget_of(self._ranks_here), task.contents.block
        if self._pool is None or (self._pool.budget, self._pool.block) != (budget, block):
            self._pool = Pool(budget, block, pinned=device.type == "cuda")
        return self._pool
