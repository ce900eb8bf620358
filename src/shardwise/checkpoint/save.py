"""To save: everybody writes beside each other, and rank 0 gives the whole a name.

    1. decide      what there is, in which bytes of which files; compared between ranks
    2. begin       rank 0 makes a partial folder and empty files; every rank must see it
    3. exchange    the bytes at the edges of pages
    4. write       every rank its own bytes, checksums on the way, synced
    5. publish     rank 0: headers → small files → manifest → rename → folder → latest

Nothing under the checkpoint's name changes before the rename, which is one step. If any rank
fails, all raise together, what was written goes, and training can go on.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardwise.checkpoint import checksum, manifest
from shardwise.checkpoint.complete import metrics
from shardwise.checkpoint.contents import Contents, collect
from shardwise.checkpoint.disk import explained, sync_folder, write_file
from shardwise.checkpoint.folder import (
    LATEST,
    Partial,
    check_replaceable,
    move_latest,
    new_token,
    publish,
    remove,
    step_of,
    surplus,
    sweep,
)
from shardwise.checkpoint.gathered import write_gathered
from shardwise.checkpoint.manifest import Manifest, record_of
from shardwise.checkpoint.meeting import from_rank_0, one_message, share, together
from shardwise.checkpoint.optimizers import Optimizers
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.points import reached
from shardwise.checkpoint.saving import Saved, SaveOptions
from shardwise.checkpoint.segments import exchange_edges
from shardwise.checkpoint.state import Training
from shardwise.checkpoint.writer import Part, Writer, allocate, pieces_of, write_header
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.shard import Sharded

__all__ = ["Task", "begin", "check_parts", "finish", "give_up", "save", "write_part"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Task:
    """One save under way, as one rank sees it.

    Attributes:
        final: the checkpoint's folder, once complete.
        token: of this save alone.
        contents: what is stored.
        facts: what the manifest says of who saved it.
        options: how.
        partial: rank 0's hold on the folder that is being written.
    """

    final: Path
    token: str
    contents: Contents
    facts: Mapping[str, Any]
    options: SaveOptions
    partial: Partial | None

    @property
    def folder(self) -> Path:
        """Where everybody writes."""
        return self.final.with_name(f"{self.final.name}.partial-{self.token}")


def save(
    sharded: Sharded,
    path: str | Path,
    optimizers: Optimizers,
    training: Training | None,
    options: SaveOptions,
) -> Saved:
    """Write a checkpoint that any number of ranks can load. A collective, between steps.

    Raises:
        CheckpointError: on every rank alike; nothing changed under ``path``.
    """
    start = time.perf_counter()
    comm = sharded.comm
    task = begin(sharded, path, optimizers, training, options)
    try:
        if options.kind == "full":
            part = write_gathered(comm, task.folder, task.contents)
        else:
            part = write_part(task, comm.rank)
        parts = [Part.decode(text) for text in share(comm, part.encode(), "parts of a checkpoint")]
        check_parts(parts)
        removed = together(
            comm, "publishing", lambda: finish(task, parts) if comm.rank == 0 else ()
        )
    except BaseException:
        give_up(task)
        raise
    removed = tuple(json.loads(from_rank_0(comm, json.dumps(removed), "what was removed")))
    nbytes = sum(file.size for file in task.contents.files)
    return Saved(task.final, nbytes, time.perf_counter() - start, removed)


def begin(
    sharded: Sharded,
    path: str | Path,
    optimizers: Sequence[Optimizer],
    training: Training | None,
    options: SaveOptions,
) -> Task:
    """Phases 1 to 3. A collective.

    Raises:
        CheckpointError: on every rank alike; nothing is left behind.
    """
    comm, final = sharded.comm, Path(path).expanduser().absolute()
    step = step_of(final.name) if training is None or training.step is None else training.step
    if optimizers or training is not None:
        training = replace(training or Training(), step=step)
    contents = collect(sharded, optimizers, training, options)
    comm.agree({"checkpoint": str(path), **contents.facts()})
    token = from_rank_0(comm, new_token(), "token of a checkpoint")
    facts = {"world": comm.size, "strategy": sharded.placement.name, "step": step}
    facts["kind"] = options.kind
    partial = together(
        comm, "beginning", lambda: _begin(final, token, contents) if comm.rank == 0 else None
    )
    task = Task(final, token, contents, facts, options, partial)
    try:
        if options.kind != "full":  # then only rank 0 needs to see it, and all of it moves
            together(comm, "looking", lambda: _check_seen(task))
            exchange_edges(comm, contents.segments)
    except BaseException:
        give_up(task)
        raise
    return task


def give_up(task: Task) -> None:
    """What was written goes, unless it was published. Rank 0 does it."""
    if task.partial is not None and task.partial.path.exists():
        task.partial.abandon()


def _begin(final: Path, token: str, contents: Contents) -> Partial:
    with explained(f"making a folder beside {final}"):
        check_replaceable(final)
        if gone := sweep(final.parent):
            log.info("removed what an interrupted save left: %s", ", ".join(gone))
        partial = Partial.make(final, token)
    try:
        with explained(f"making the files of {final.name}"):
            blocks = sum(file.size for file in contents.files) // BLOCK
            more = sum(map(len, contents.small.values())) + 8 * blocks + (1 << 16)  # the manifest
            allocate(partial.path, contents.files, more)
            sync_folder(partial.path)
    except BaseException:
        partial.abandon()
        raise
    reached("folder made", 0)
    return partial


def _check_seen(task: Task) -> None:
    """Every rank must see the files that rank 0 made."""
    absent = [f.name for f in task.contents.files if not (task.folder / f.name).is_file()]
    if absent:
        raise CheckpointError(
            f"on {socket.gethostname()}, {task.folder.parent} does not show the folder that rank 0 "
            "has just made there: it is local to each host, not a shared file system. A checkpoint "
            "is one folder that every rank writes to. Save to a path that all hosts share, or run "
            "all ranks on one host."
        )


def write_part(task: Task, rank: int) -> Part:
    """Phase 4: this rank's bytes. What goes wrong is said in the part, for all to know."""
    try:
        with Writer(task.folder, rank, task.contents.total(rank)) as writer:
            for chunk in task.contents.chunks(rank):
                writer.write(chunk)
            return writer.finish()
    except CheckpointError as error:
        return Part({}, str(error))


def check_parts(parts: Sequence[Part]) -> None:
    """Raises ``CheckpointError`` if a rank could not write its part."""
    if failed := {rank: part.error for rank, part in enumerate(parts) if part.error}:
        raise CheckpointError(one_message(failed, len(parts)))


# --- rank 0 ----------------------------------------------------------------------------------


def finish(task: Task, parts: Sequence[Part]) -> tuple[str, ...]:
    """Phase 5: make it whole, give it its name, and let old ones go; their names.

    Raises:
        CheckpointError: it is not published; or it is, and ``latest`` could not be moved.
    """
    assert task.partial is not None  # rank 0 has it
    reached("all parts known", 0)
    with explained(f"publishing {task.final.name}"):
        files = {}
        for file in task.contents.files:
            pieces = [*write_header(task.folder, file), *pieces_of(parts, file.name)]
            blocks = checksum.block_checksums(pieces, file.size, file.name)
            files[file.name] = record_of(blocks, file.size)
        reached("headers written", 0)
        for name, data in task.contents.small.items():
            write_file(task.folder / name, data)
            files[name] = record_of(checksum.of_bytes(data), len(data))
        sync_folder(task.folder)
        reached("small files written", 0)
        _write_manifest(task.folder, _manifest(task, files))
        publish(task.partial)
    if step_of(task.final.name) is not None:
        with explained(f"pointing {LATEST} at {task.final.name}, which is complete,"):
            move_latest(task.final)
    return _retire(task)


def _manifest(task: Task, files: Mapping[str, manifest.FileRecord]) -> Manifest:
    from shardwise import __version__

    versions = {
        "shardwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Manifest(
        token=task.token,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        metric=task.contents.metric,
        aliases=dict(task.contents.aliases),
        files=dict(files),
        **task.facts,
    )


def _write_manifest(folder: Path, made: Manifest) -> None:
    unfinished = folder / f".{manifest.NAME}.unfinished"
    write_file(unfinished, made.encode())
    reached("manifest unfinished", 0)
    unfinished.rename(folder / manifest.NAME)
    sync_folder(folder)
    reached("manifest written", 0)


def _retire(task: Task) -> tuple[str, ...]:
    """Old checkpoints go. That this fails is no reason to lose the new one."""
    limit = task.options.save_total_limit
    if limit is None or step_of(task.final.name) is None:
        return ()
    gone = []
    for path in surplus(metrics(task.final.parent), limit, task.options.keep_best):
        try:
            remove(path)
            gone.append(path.name)
        except OSError as error:
            log.warning("%s is no longer needed and could not be removed: %s", path, error)
    return tuple(gone)
