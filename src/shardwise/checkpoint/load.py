"""To load: each rank reads what it holds, at any number of ranks, with any strategy.

    1. open       the manifest, the headers, what fits and what does not: before anything changes
    2. read       each rank its own ranges, checked block by block
    3. restore    optimizers, scheduler, generators

Every rank does each phase, and they go on only if all could: so either all ranks have loaded, or
all raise the same error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardwise.checkpoint import manifest, training_state
from shardwise.checkpoint.collectives import (
    all_gather_object,
    broadcast_object,
    joined_message,
    raise_on_all,
    run_on_rank_0,
)
from shardwise.checkpoint.disk import retried
from shardwise.checkpoint.folder import (
    LATEST,
    is_leftover,
    mark_broken,
    move_latest,
    resolve,
    steps_to_resume,
    target_of,
)
from shardwise.checkpoint.load_plan import LoadPlan, OpenCheckpoint, open_checkpoint
from shardwise.checkpoint.local_shards import ShardedModel
from shardwise.checkpoint.options import Loaded, LoadOptions
from shardwise.checkpoint.read_requests import read_from_rank_0, read_into
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.run_folder import read_manifest, saved_in
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError, DamagedCheckpoint, ShardwiseError

log = logging.getLogger("shardwise")

REPLACED = "Some tensors of the model were already replaced"


def load(sharded: ShardedModel, path: str | Path, options: LoadOptions) -> Loaded:
    """Load a checkpoint into the model. A collective, between steps."""
    comm = sharded.comm
    comm.fence(Label("fence", "load"))  # nobody still reads the memory that is filled next
    with ExitStack() as stack:
        from_rank_0_alone = _only_rank_0_sees(comm, path)
        opened = raise_on_all(
            comm,
            "opening",
            lambda: (
                None if from_rank_0_alone and comm.rank else _opened(path, options, stack, comm)
            ),
        )
        if from_rank_0_alone:
            encoded = broadcast_object(comm, opened.encode() if opened else [], "what is stored")
            checkpoint = opened or OpenCheckpoint.decode(encoded)
        else:
            assert opened is not None
            checkpoint = opened
            _check_identity(comm, checkpoint)
        plan = raise_on_all(comm, "comparing", lambda: _fitted(sharded, checkpoint, options))
        raise_on_all(comm, "reading", lambda: _read(comm, checkpoint, plan, from_rank_0_alone))
        report = raise_on_all(comm, "restoring", lambda: _restored(checkpoint, plan, options))
    for bucket in sharded.buckets:
        bucket.expire()
    made = checkpoint.source.manifest
    sharded.loaded_token = made.token if made else ""
    if made is None and comm.rank == 0:
        log.warning(
            "%s has no manifest, so nothing could tell whether its bytes are those that were "
            "written; headers and sizes fit",
            checkpoint.source.folder,
        )
    return report


def _only_rank_0_sees(comm: Comm, path: str | Path) -> bool:
    """Is it of kind ``"full"``, on a disk that not all ranks share? A collective."""
    seen = all_gather_object(comm, _glance(path), "a look at the checkpoint")
    return seen[0].startswith("full ") and len(set(seen)) > 1


def _glance(path: str | Path) -> str:
    """Its kind and token; ``""`` where that cannot be seen."""
    try:
        manifest = read_manifest(resolve(Path(path).expanduser().absolute()))
    except (CheckpointError, OSError):
        return ""  # whoever opens it says why
    return "" if manifest is None else f"{manifest.kind} {manifest.token}"


def _opened(path: str | Path, options: LoadOptions, stack: ExitStack, comm: Comm) -> OpenCheckpoint:
    with _understood(path):
        checkpoint = open_checkpoint(path, options, stack)
    source = checkpoint.source
    if source.manifest is None:
        _check_foreign(source)
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
            f"{joined_message(other, comm.size)}. The path means another folder on each host. "
            "Nothing of it was used. Load one that all hosts have."
        )


def _check_foreign(source: CheckpointReader) -> None:
    """A folder without a manifest must not be one of ours that has lost it, or never had it."""
    if is_leftover(source.folder.name) or source.has(training_state.NAME):
        raise DamagedCheckpoint(
            f"{source.folder} has no {manifest.NAME}, and shardwise began it, so it was not "
            "written to its end or was damaged since. Nothing of it was used. Load another "
            "checkpoint; or, for its weights as they are, one of its safetensors files."
        )


def resume(sharded: ShardedModel, run: str | Path, options: LoadOptions) -> Loaded | None:
    """Load the newest checkpoint of a run's folder that is whole. A collective.

    When it is loaded, those that were found damaged are renamed, to ``broken-step-N-1``. Until then
    nothing on the disk changes.

    Returns:
        The report, or ``None`` where the folder holds no checkpoint.

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
    """The name of the newest complete one that is not ``damaged``.

    Adds to ``damaged`` what is not complete. ``""`` where there is no checkpoint at all.
    """
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
            f"{folder} holds {len(damaged)} checkpoints, and none that is whole, so nothing can be "
            f"resumed: {'; '.join(damaged.values())} Restore one from a copy; or, to begin anew, "
            "move them away."
        )
    return ""


def _check_nothing(folder: Path) -> None:
    """Rank 0 finds no checkpoint: a mount that is missing must not look like a new run."""
    paths = retried(f"looking into {folder}", lambda: steps_to_resume(folder))
    seen = [path.name for path in paths] + [LATEST] * os.path.lexists(folder / LATEST)
    if seen:
        raise CheckpointError(
            f"{folder} on {socket.gethostname()} shows {', '.join(seen[:8])}, and rank 0 finds no "
            "checkpoint there, so nothing was resumed. Look whether the disk is mounted on every "
            "host, and whether checkpoints were moved; to begin anew, remove what is left."
        )


def _mark(folder: Path, damaged: Collection[str], loaded: str) -> None:
    """A start has succeeded without the damaged ones, so from now on they do not count."""
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


def _fitted(sharded: ShardedModel, checkpoint: OpenCheckpoint, options: LoadOptions) -> LoadPlan:
    with _understood(checkpoint.source.folder):
        return LoadPlan(sharded, checkpoint, options)


def _restored(checkpoint: OpenCheckpoint, plan: LoadPlan, options: LoadOptions) -> Loaded:
    with _understood(checkpoint.source.folder, REPLACED):
        plan.apply(options.training)
        return plan.report()


@contextmanager
def _understood(path: str | Path, so_far: str = "Nothing of it was used") -> Iterator[None]:
    """Checksums vouch for bytes, not for sense: what nobody can make sense of is an error of ours.

    On every rank alike, too: an index of others may lack what only one rank looks for.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} holds what cannot be understood, or what a scheduler or scaler does not take "
            f"({type(error).__name__}: {str(error)[:200]}). {so_far}. Load another checkpoint."
        ) from error


def _read(comm: Comm, checkpoint: OpenCheckpoint, plan: LoadPlan, from_rank_0_alone: bool) -> None:
    try:
        if from_rank_0_alone:
            read_from_rank_0(comm, checkpoint.source, plan.requests)
        else:
            read_into(checkpoint.source, plan.requests, comm.rank, comm.size)
    except CheckpointError as error:
        raise type(error)(
            f"{error} {REPLACED}: load another checkpoint before you use it."
        ) from error
