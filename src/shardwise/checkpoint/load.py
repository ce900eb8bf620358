"""Loading: each rank reads what it holds, at any number of ranks, with any strategy.

    1. open       the manifest and the headers
    2. compare    what fits the model and what does not: before anything changes
    3. read       each rank its own ranges, checked block by block
    4. restore    optimizers, scheduler, generators

A phase begins when the one before succeeded on every rank. So either all ranks have loaded, or all
raise the same error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoint import manifest, training_state
from shardwise.checkpoint.collectives import (
    all_gather_object,
    joined_message,
    raise_on_all,
    run_on_rank_0,
)
from shardwise.checkpoint.disk import retried
from shardwise.checkpoint.folder import checkpoints, mark_broken, move_latest, resolve, target_of
from shardwise.checkpoint.load_plan import LoadPlan, OpenCheckpoint, open_checkpoint
from shardwise.checkpoint.options import Loaded, LoadOptions
from shardwise.checkpoint.read_requests import read_from_rank_0, read_into
from shardwise.checkpoint.reader import OF_TORCH
from shardwise.checkpoint.recognise import CHECKPOINTS, LATEST, is_leftover, is_ours
from shardwise.checkpoint.run_folder import manifest_lost, read_manifest, saved_in
from shardwise.comm.garbage import uncollected
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError, DamagedCheckpoint, ShardwiseError
from shardwise.optim.sharded_model import ShardedModel

log = logging.getLogger("shardwise")

T = TypeVar("T")


@uncollected()
def load(sharded: ShardedModel, path: str | Path, options: LoadOptions) -> Loaded:
    """Load a checkpoint into the model. A collective, between steps."""
    comm = sharded.comm
    comm.fence(Label("fence", "load"))  # nobody still reads the memory that is filled next
    with ExitStack() as stack:
        from_rank_0_alone = _only_rank_0_sees(comm, path)
        opened = _understood(path, lambda: _opened(path, options, stack, comm))
        if from_rank_0_alone:
            encoded = run_on_rank_0(comm, "opening a checkpoint", lambda: opened().encode())
            checkpoint = OpenCheckpoint.decode(encoded, stack)
        else:
            checkpoint = raise_on_all(comm, "opening a checkpoint", opened)
            _check_identity(comm, checkpoint)
        planned = _understood(path, lambda: LoadPlan(sharded, checkpoint, options))
        plan = raise_on_all(comm, "comparing a checkpoint", planned)
        raise_on_all(
            comm, "reading a checkpoint", lambda: _read(comm, checkpoint, plan, from_rank_0_alone)
        )
        so_far = "The weights are already those of this checkpoint, and the rest may be as before"
        restored = _understood(path, lambda: plan.restore(options.training), so_far)
        report = raise_on_all(comm, "restoring a checkpoint", restored)
    for bucket in sharded.buckets:
        bucket.expire()
    made = checkpoint.source.manifest
    sharded._background.loaded_token = made.token if made else ""
    if made is None and comm.rank == 0:
        log.warning(
            "%s has no manifest, so its bytes could not be checked; headers and sizes were",
            checkpoint.source.folder,
        )
    return report


def _only_rank_0_sees(comm: Comm, path: str | Path) -> bool:
    """Is it of kind ``"full"``, on a disk that not all ranks share? A collective."""
    seen = all_gather_object(comm, _glance(path), "a look at the checkpoint")
    return seen[0].startswith("full ") and len(set(seen)) > 1


def _glance(path: str | Path) -> str:
    """The checkpoint's kind and token; ``""`` if they cannot be read."""
    try:
        manifest = read_manifest(resolve(Path(path).expanduser().absolute()))
    except (CheckpointError, OSError):
        return ""  # opening it raises the reason
    return "" if manifest is None else f"{manifest.kind} {manifest.token}"


def _opened(path: str | Path, options: LoadOptions, stack: ExitStack, comm: Comm) -> OpenCheckpoint:
    checkpoint = open_checkpoint(path, options, stack)
    source = checkpoint.source
    if source.manifest is None:
        if is_leftover(source.folder.name) or source.has(training_state.NAME):
            raise manifest_lost(source.folder)
    elif comm.rank == 0:
        for name, record in source.manifest.files.items():
            if not name.endswith(".safetensors"):  # config.json: others read what we do not
                source.check(name, 0, record.size)
    return checkpoint


def _check_identity(comm: Comm, checkpoint: OpenCheckpoint) -> None:
    """Every rank must have opened the same checkpoint."""
    here = f"{checkpoint.identity} on {socket.gethostname()}"
    texts = all_gather_object(comm, here, "identity of a checkpoint")
    first = texts[0].rpartition(" on ")[0]
    other = {rank: text for rank, text in enumerate(texts) if text.rpartition(" on ")[0] != first}
    if other:
        raise CheckpointError(
            f"the ranks opened different checkpoints: rank 0 {texts[0]}; "
            f"{joined_message(other, comm.size)}. The path names a different folder on each host. "
            "Nothing was loaded. Load one that all hosts have."
        )


def resume(sharded: ShardedModel, run: str | Path, options: LoadOptions) -> Loaded | None:
    """Load the newest checkpoint of a run's folder that is whole. A collective.

    When it is loaded, damaged ones are renamed to ``broken-NAME-1``. Until then nothing on the
    disk changes. ``None`` where the folder holds no checkpoint.

    Raises:
        CheckpointError: the newest whole one does not fit the model, or cannot be read; or some
            rank sees checkpoints where rank 0 sees none.
        DamagedCheckpoint: there are checkpoints, and all are damaged.
    """
    comm, folder = sharded.comm, Path(run).expanduser().absolute()
    damaged: dict[str, str] = {}
    while True:
        name = run_on_rank_0(comm, "checkpoint to resume", lambda: _candidate(folder, damaged))
        if not name:
            raise_on_all(comm, "nothing to resume", lambda: _check_nothing(folder))
            if comm.rank == 0 and (reason := _why_nothing(folder)):
                log.warning("nothing was resumed, and the run starts from scratch: %s", reason)
            return None
        try:
            report = load(sharded, folder / name, options)
        except DamagedCheckpoint as error:
            damaged[name] = str(error)
            if comm.rank == 0:
                log.warning("SKIPPED %s, which is broken: %s", folder / name, error)
        else:
            if comm.rank == 0:
                _mark(folder, damaged, name)
            return report


def _candidate(folder: Path, damaged: dict[str, str]) -> str:
    """The newest complete one that is not ``damaged``; ``""`` where there is no checkpoint at all.

    Adds to ``damaged`` what is not complete.
    """
    if is_ours(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint, and resume() takes the folder of a run, whose newest "
            f"checkpoint it finds. Nothing was loaded. Call load({str(folder)!r}), or "
            f"resume({str(folder.parent)!r})."
        )
    checkpoint = saved_in(folder)
    for path, reason in checkpoint.skipped:
        if path.name not in damaged:
            damaged[path.name] = reason
            log.warning("SKIPPED %s, which is not complete: %s", path, reason)
    for path, _ in checkpoint.complete:
        if path.name not in damaged:
            return path.name
    if damaged:
        raise DamagedCheckpoint(
            f"{folder} holds {len(damaged)} checkpoints, none of them complete, so nothing can be "
            f"resumed: {'; '.join(damaged.values())} Restore one from a copy; or, to start from "
            "scratch, move them away."
        )
    return ""


def _check_nothing(folder: Path) -> None:
    """Rank 0 finds no checkpoint: a mount that is missing must not look like a new run."""
    paths = retried(f"looking into {folder}", lambda: checkpoints(folder))
    seen = [path.name for path in paths] + [LATEST] * os.path.lexists(folder / LATEST)
    if seen:
        raise CheckpointError(
            f"{folder} on {socket.gethostname()} shows {', '.join(seen[:8])}, and rank 0 finds no "
            "checkpoint there, so nothing was resumed. Check whether the disk is mounted on every "
            "host, and whether checkpoints were moved; to start from scratch, remove what is left."
        )


def _why_nothing(folder: Path) -> str:
    """Name the folder's weights that are no checkpoint of a run, and why; ``""``: none."""
    if checkpoints(folder / CHECKPOINTS):
        return f"the checkpoints of {folder} are in {folder / CHECKPOINTS}; resume that folder"
    paths = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    held = [p.name for p in paths if not is_leftover(p.name) and _holds_weights(p)]
    if not held:
        return ""
    return (
        f"{', '.join(held[:8])} in {folder} holds weights and no manifest, as exports do, or was "
        "marked as broken. load() reads safetensors; `shardwise export` converts pickles of torch"
    )


def _holds_weights(folder: Path) -> bool:
    return any(p.suffix in (".safetensors", ".distcp", *OF_TORCH) for p in folder.glob("*"))


def _mark(folder: Path, damaged: Collection[str], loaded: str) -> None:
    """Rename the damaged ones, since the run goes on from the one that was ``loaded``."""
    try:
        for name in damaged:
            if any(
                (folder / name / file).exists() for file in (manifest.NAME, training_state.NAME)
            ):
                log.warning("damaged %s renamed to %s", name, mark_broken(folder / name).name)
        if target_of(folder) in damaged:
            move_latest(folder / loaded)
    except (CheckpointError, OSError) as error:
        log.warning("%s: what is broken there could not be renamed: %s", folder, error)


def _understood(
    path: str | Path, act: Callable[[], T], so_far: str = "Nothing of it was used"
) -> Callable[[], T]:
    """``act``, whose errors of other classes become a ``CheckpointError``.

    Checksums prove that bytes are those that were written, and not that they make sense.
    """

    def understood() -> T:
        try:
            return act()
        except ShardwiseError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} has state that cannot be read, or that a scheduler or scaler does not "
                f"accept ({type(error).__name__}: {str(error)[:200]}). {so_far}. Load another "
                "checkpoint."
            ) from error

    return understood


def _read(comm: Comm, checkpoint: OpenCheckpoint, plan: LoadPlan, from_rank_0_alone: bool) -> None:
    try:
        if from_rank_0_alone:
            read_from_rank_0(comm, checkpoint.source, plan.requests)
        else:
            read_into(checkpoint.source, plan.requests, comm.rank, comm.size)
    except CheckpointError as error:
        raise type(error)(
            f"{error} Some tensors of the model were already replaced: load another checkpoint "
            "before you use it."
        ) from error
