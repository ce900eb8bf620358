"""Saving: every rank writes its own bytes, and rank 0 publishes the folder.

    1. decide      what is stored in which bytes of which files; compared between ranks
    2. begin       rank 0 makes a partial folder and empty files, which every rank must see
    3. exchange    the bytes at the edges of pages
    4. write       every rank its own bytes, checksums on the way, synced
    5. publish     rank 0: headers → small files → manifest → rename → folder
    6. settle      rank 0: move latest, remove old checkpoints

If any rank fails, all raise the same error, what was written is removed, and training can go on.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.checkpoint import training_state
from shardwise.checkpoint.collectives import agreed, raise_on_all
from shardwise.checkpoint.disk import explained, sync_folder
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.folder import (
    Partial,
    check_latest,
    check_replaceable,
    move_latest,
    new_token,
    remove_stale_partials,
)
from shardwise.checkpoint.options import MakeRequest, Saved, SaveRequest
from shardwise.checkpoint.publish import publish_files
from shardwise.checkpoint.recognise import LATEST, is_ours, step_of
from shardwise.checkpoint.run_folder import Retention, apply_retention
from shardwise.checkpoint.save_plan import SavedState, SavePlan, plan_save, state_to_save, sums_of
from shardwise.checkpoint.segments import exchange_edges
from shardwise.checkpoint.training_state import Training
from shardwise.checkpoint.writer import Part, allocate, check_parts
from shardwise.comm.garbage import uncollected
from shardwise.errors import CheckpointError
from shardwise.optim.sharded_model import ShardedModel

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Task:
    """One save under way, as one rank sees it."""

    final: Path  # the checkpoint's folder, once complete
    token: str
    contents: SavePlan
    facts: Mapping[str, Any]  # fields of the manifest: who saved it
    resumed_from: str  # token of the checkpoint that the run goes on from; "" if there is none
    request: SaveRequest
    partial: Partial | None  # the folder that is being written, on rank 0

    @property
    def folder(self) -> Path:
        """The folder that every rank writes to."""
        return self.final.with_name(f"{self.final.name}.partial-{self.token}")


def save(sharded: ShardedModel, make_request: MakeRequest) -> Saved:
    """Write a checkpoint that any number of ranks can load. A collective, between steps."""
    start = time.perf_counter()
    comm = sharded.comm
    task = begin(sharded, make_request)
    try:
        parts = task.contents.write(comm, task.folder, task.request.options.kind == "full")
        publish = partial(finish, task, parts)
        _, removed = agreed(comm, "publishing", publish, share=lambda names: names)
    except BaseException:
        give_up(task)
        raise
    return Saved(task.final, task.contents.nbytes, time.perf_counter() - start, tuple(removed[0]))


@uncollected()
def begin(sharded: ShardedModel, make_request: MakeRequest) -> Task:
    """Phases 1 to 3. A collective."""
    comm, token = sharded.comm, new_token()
    updates = {"steps since backward()": ", ".join(sharded.runtime.trained.taken) or "none"}
    # First what may fail on one rank alone, and what decides which collectives follow.
    (request, state), shared = agreed(
        comm,
        "what is saved",
        lambda: _chosen(sharded, make_request()),
        lambda chosen: {**_facts(*chosen), **updates},
        lambda chosen: _shared(token, *chosen),
    )
    token, final, kind = shared[0][0], _final(request), request.options.kind
    training, partials = request.training, list[Partial]()

    def plan() -> SavePlan:
        contents = plan_save(sharded, request, state, [own for _, *own in shared])
        if comm.rank == 0:
            partials.append(_make_folder(final, token, contents))
        return contents

    try:
        contents, _ = agreed(comm, "files", plan, SavePlan.facts)
        step, metric = (training.step, training.metric) if training else (step_of(final.name), None)
        stated = {"world": comm.size, "strategy": sharded.placement.name, "step": step}
        stated |= {"kind": kind, "metric": None if metric is None else float(metric)}
        before, partial = sharded._background.loaded_token, partials[0] if partials else None
        task = Task(final, token, contents, stated, before, request, partial)
        if not (request.background or kind == "full"):  # a thread looks for itself; rank 0 writes
            raise_on_all(comm, "looking for the folder", lambda: check_shared(task.folder))
        if kind != "full":  # of that kind all bytes move to rank 0 as they are written
            exchange_edges(comm, contents.segments)
    except BaseException:
        for partial in partials:
            partial.abandon()
        raise
    return task


def _chosen(sharded: ShardedModel, request: SaveRequest) -> tuple[SaveRequest, SavedState]:
    training = request.training
    if request.optimizers or training is not None:
        training = training or Training()
        step = step_of(_final(request).name) if training.step is None else training.step
        request = replace(request, training=replace(training, step=step))
    return request, state_to_save(sharded, request)


def _shared(token: str, request: SaveRequest, state: SavedState) -> tuple[Any, ...]:
    return token, state.values.get("local"), sums_of(state.whole) if request.training else {}


def _final(request: SaveRequest) -> Path:
    return Path(request.path).expanduser().absolute()


def _facts(request: SaveRequest, state: SavedState) -> dict[str, str]:
    training, kind = request.training, str(request.options.kind)
    facts = {"path": str(request.path), "kind of checkpoint": kind}
    facts |= {"optimizers": str(len(request.optimizers)), "training state": str(bool(training))}
    return facts | (training_state.facts_of(training, state.values) if training else {})


def check_shared(folder: Path) -> None:
    """Raises ``CheckpointError`` where this rank does not see the folder that rank 0 made."""
    if not folder.is_dir():
        raise CheckpointError(
            f"on {socket.gethostname()}, {folder.parent} does not show the folder that rank 0 has "
            "just made there: it is local to each host, not a shared file system. A checkpoint of "
            "this kind is one folder that every rank writes to. Save to a path that all hosts "
            "share; or with kind='full', which rank 0 alone writes, and reads for all."
        )


def give_up(task: Task) -> None:
    """Remove what was written, unless it was published; on rank 0."""
    if task.partial is not None:
        task.partial.abandon()


def _make_folder(final: Path, token: str, contents: SavePlan) -> Partial:
    with explained(f"making a folder beside {final}"):
        check_replaceable(final)
        check_latest(final.parent)
        if removed := remove_stale_partials(final.parent):
            log.info("removed what an interrupted save left: %s", ", ".join(removed))
        partial = Partial.make(final, token)
    try:
        with explained(f"making the files of {final.name}"):
            blocks = sum(file.size for file in contents.files) // contents.block
            more = sum(map(len, contents.small.values())) + 8 * blocks + (1 << 16)  # the manifest
            allocate(partial.path, contents.files, more, "lower save_total_limit, ")
            sync_folder(partial.path)
    except BaseException:
        partial.abandon()
        raise
    hit("folder made", 0)
    return partial


# --- publishing ------------------------------------------------------------------------------


def finish(task: Task, parts: Sequence[Part]) -> tuple[str, ...]:
    """Phases 5 and 6 on rank 0; returns names of removed checkpoints. All ranks check ``parts``."""
    check_parts(parts)
    if task.partial is None:
        return ()
    hit("all parts known", 0)
    contents = task.contents
    facts = {**task.facts, "token": task.token, "aliases": dict(contents.aliases)}
    publish_files(task.partial, contents.files, parts, contents.small, facts)
    return _settle(task)


def _settle(task: Task) -> tuple[str, ...]:
    """Phase 6: move ``latest``, and remove old ones; returns their names."""
    if is_ours(task.final.parent):  # in a checkpoint, which is no run
        return ()
    with explained(f"pointing {LATEST} at {task.final.name}, which is complete,"):
        move_latest(task.final)
    if (limit := task.request.options.save_total_limit) is None:
        return ()
    keep = Retention(limit, task.request.options.keep_best, (task.token, task.resumed_from))
    return apply_retention(task.final.parent, keep)
