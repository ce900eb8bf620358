"""To save while training goes on: a snapshot now, the writing on a thread of its own.

    main thread   begin · exchange edges · copy      step      step      step      step
    writer                              write ─────────── sync ─ part
    rank 0's writer                     write ─────────── sync ─ parts of all ─ publish

The writers never use the comm, which belongs to the steps: they leave their parts as files in the
folder that is being written. How far they are, the ranks tell each other at each optimizer step,
so that an error on one is an error on all, within a step, and before parameters change again.
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.meeting import (
    await_parts,
    from_rank_0,
    leave_part,
    one_message,
    share,
    together,
)
from shardwise.checkpoint.optimizers import Optimizers
from shardwise.checkpoint.points import reached
from shardwise.checkpoint.save import Task, begin, check_parts, finish, give_up
from shardwise.checkpoint.saving import Saved, SaveOptions
from shardwise.checkpoint.snapshot import Pool, Slab
from shardwise.checkpoint.state import Training
from shardwise.checkpoint.writer import Chunk, Part, Writer
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.shard import Sharded

__all__ = ["Background", "Saving"]

log = logging.getLogger("shardwise")

BUSY, DONE, FAILED = range(3)
GLANCE = 0.05  # seconds between two looks while all ranks wait


class Saving:
    """A save on its way. All methods are collectives."""

    def __init__(self, task: Task, comm: Comm, pool: Pool) -> None:
        self.path: Path = task.final
        self._task, self._comm, self._pool = task, comm, pool
        self._start = time.perf_counter()
        self._chunks: SimpleQueue[tuple[Chunk, Slab] | None] = SimpleQueue()
        self._cancelled = Event()
        self._error = ""
        self._removed: tuple[str, ...] = ()
        self._saved: Saved | None = None
        self.told = False  # has it raised what went wrong? Whoever waited for it knows, then
        name = f"saving {task.final.name}, rank {comm.rank}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        atexit.register(self._at_exit)

    def check(self) -> Saved | None:
        """Where it is: ``None`` while any rank still writes.

        Raises:
            CheckpointError: on every rank alike, if any failed. Nothing is published, and
                training can go on.
        """
        if self._saved is not None:
            return self._saved
        mine = BUSY if self._thread.is_alive() else FAILED if self._error else DONE
        flags = torch.zeros(self._comm.size, dtype=torch.uint8, device=self._comm.device)
        flags[self._comm.rank] = mine
        self._comm.all_gather(flags, Label("agree", "saving")).wait()
        found = set(flags.tolist())
        if FAILED in found:
            self._fail(mine == FAILED)
        if found == {DONE}:
            self._close()
            text = from_rank_0(self._comm, json.dumps(self._removed), "what was removed")
            nbytes = sum(file.size for file in self._task.contents.files)
            seconds = time.perf_counter() - self._start
            self._saved = Saved(self.path, nbytes, seconds, tuple(json.loads(text)))
        return self._saved

    def wait(self) -> Saved:
        """Return when it is complete. Raises as ``check`` does."""
        while True:
            self._thread.join(GLANCE)
            if (saved := self.check()) is not None:
                return saved

    def take(self) -> None:
        """Copy everything that this rank writes, and start to write it.

        Writing begins when all is copied, since both want the processor and training waits for
        the copy; at once, where the copy has not enough room.
        """
        rank = self._comm.rank
        fits = self._task.contents.total(rank) <= self._pool.room
        if not fits:
            self._thread.start()
        try:
            for chunk in self._task.contents.chunks(rank):
                self._chunks.put(self._pool.keep(chunk))
        finally:
            self._pool.rewind()
            self._chunks.put(None)
            if fits:
                self._thread.start()
        reached("snapshot taken", rank)

    def cancel(self) -> None:
        """Give it up, on this rank: nothing is published, and what was written goes."""
        self._cancelled.set()
        self._thread.join(10.0)
        give_up(self._task)
        self._close()

    def _fail(self, here: bool) -> None:
        said = share(self._comm, self._error if here else "", "why saving failed")
        self.told = True
        self.cancel()
        told = {rank: text for rank, text in enumerate(said) if text}
        # Rank 0 repeats what it heard from another; the other says it better.
        if len(told) > 1:
            told = {rank: text for rank, text in told.items() if rank} or told
        raise CheckpointError(
            f"saving {self.path} in the background failed: {one_message(told, self._comm.size)}"
        )

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
        part = self._write()
        self._error = part.error
        try:
            with explained(f"leaving word of what was written in {self._task.folder.name}"):
                leave_part(self._task.folder, self._comm.rank, part.encode())
        except CheckpointError as failure:  # the others learn it at the next step
            self._error = self._error or str(failure)
            return
        if self._task.partial is not None:
            try:
                self._publish()
            except Exception as failure:  # noqa: BLE001 - the main thread raises it
                self._error = _told(failure)

    def _write(self) -> Part:
        """Write what comes. After an error the rest is only let go, or the copying would wait."""
        error, rank = "", self._comm.rank
        with Writer(self._task.folder, rank, self._task.contents.total(rank)) as writer:
            while (item := self._chunks.get()) is not None:
                chunk, slab = item
                try:
                    if not error and not self._cancelled.is_set():
                        writer.write(chunk)
                except Exception as failure:  # noqa: BLE001 - the main thread raises it
                    error = _told(failure)
                finally:
                    self._pool.give_back(slab)
            try:
                if not error and not self._cancelled.is_set():
                    return writer.finish()
            except Exception as failure:  # noqa: BLE001 - the main thread raises it
                error = _told(failure)
        return Part({}, error or "it was given up")

    def _publish(self) -> None:
        texts = await_parts(self._task.folder, self._comm.size, self._cancelled)
        parts = [Part.decode(text) for text in texts]
        check_parts(parts)
        self._removed = finish(self._task, parts)


def _told(failure: Exception) -> str:
    """What the ranks tell each other of it; an error that is not ours is logged in full."""
    if isinstance(failure, CheckpointError):
        return str(failure)
    log.error("saving in the background", exc_info=failure)
    return f"{type(failure).__name__}: {failure}"


class Background:
    """One model's saves in the background: at most one at a time, and the memory for it."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._pool: Pool | None = None
        self._budget = 0

    def save(
        self,
        sharded: Sharded,
        path: str | Path,
        optimizers: Optimizers,
        training: Training | None,
        options: SaveOptions,
    ) -> Saving | None:
        """Start to save; ``None`` if one is under way and ``when_busy`` is ``"skip"``.

        Raises:
            CheckpointError: this save could not begin, or the one before it failed.
        """
        if options.when_busy == "skip" and not self.check():
            if sharded.comm.rank == 0:
                log.warning("%s is not saved: the save before it is still being written", path)
            return None
        self.settle()
        pool = together(sharded.comm, "memory", lambda: self._memory(options, sharded.comm))
        task = begin(sharded, path, optimizers, training, options)
        if task.hold.is_split:
            give_up(task)
            raise CheckpointError(
                f"{task.final.parent} is local to each host, and save_async() has no word from "
                "other hosts of when they have published, without which an old checkpoint may go "
                "too soon. Nothing was written. Call save(..., kind='local'), or save to a path "
                "that all hosts share."
            )
        saving = Saving(task, sharded.comm, pool)
        try:
            saving.take()
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

    def settle(self) -> None:
        """Wait for what is under way. Raises what went wrong, once. A collective."""
        saving = self._taken()
        if saving is not None:
            saving.wait()

    def _taken(self) -> Saving | None:
        saving, self._saving = self._saving, None
        return None if saving is None or saving.told else saving

    def _memory(self, options: SaveOptions, comm: Comm) -> Pool:
        if self._pool is None or self._budget != options.snapshot_bytes:
            self._pool = Pool(options.snapshot_bytes, pinned=comm.device.type == "cuda")
            self._budget = options.snapshot_bytes
        return self._pool
