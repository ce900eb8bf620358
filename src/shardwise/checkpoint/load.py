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
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from shardwise.checkpoint import manifest, state
from shardwise.checkpoint.complete import read_manifest, saved_in
from shardwise.checkpoint.disk import retried
from shardwise.checkpoint.fit import Fitted, Found, Loaded, Wish, open_found
from shardwise.checkpoint.folder import (
    LATEST,
    is_leftover,
    mark_broken,
    move_latest,
    resolve,
    steps_to_resume,
    target_of,
)
from shardwise.checkpoint.gathered import read_from_rank_0
from shardwise.checkpoint.meeting import by_rank_0, one_message, share, together
from shardwise.checkpoint.reader import Want, fill
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.target import ShardedModel
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError, DamagedCheckpoint, ShardwiseError

__all__ = ["load", "resume"]

log = logging.getLogger("shardwise")

REPLACED = "Some tensors of the model were already replaced"


def load(sharded: ShardedModel, path: str | Path, wish: Wish) -> Loaded:
    """Load a checkpoint into the model. A collective, between steps.

    Raises:
        CheckpointError: on every rank alike. If it says so, some tensors were already replaced.
        DamagedCheckpoint: the same, where bytes are missing or not those that were written. What
            the disk does not let be read is not damage.
    """
    comm = sharded.comm
    comm.fence(Label("fence", "load"))  # nobody still reads the memory that is filled next
    with ExitStack() as stack:
        from_rank_0_alone = _only_rank_0_sees(comm, path)
        if from_rank_0_alone:
            found = _opened_by_rank_0(comm, path, wish, stack)
        else:
            found = together(comm, "opening", lambda: _opened(path, wish, stack, comm.rank))
            _check_identity(comm, found)
        fitted = together(comm, "comparing", lambda: _fitted(sharded, found, wish))
        read = partial(read_from_rank_0, comm) if from_rank_0_alone else partial(_fill, comm)
        together(comm, "reading", lambda: _read(found, fitted, read))
        report = together(comm, "restoring", lambda: _restored(found, fitted, wish))
    for bucket in sharded.buckets:
        bucket.expire()
    made = found.source.manifest
    sharded.loaded_token = made.token if made else ""
    if made is None and comm.rank == 0:
        log.warning(
            "%s has no manifest, so nothing could tell whether its bytes are those that were "
            "written; headers and sizes fit",
            found.source.folder,
        )
    return report


def _only_rank_0_sees(comm: Comm, path: str | Path) -> bool:
    """Is it of kind ``"full"``, on a disk that not all ranks share? A collective."""
    seen = share(comm, _glance(path), "a look at the checkpoint")
    return seen[0].startswith("full ") and len(set(seen)) > 1


def _glance(path: str | Path) -> str:
    """Its kind and token; ``""`` where that cannot be seen."""
    try:
        manifest = read_manifest(resolve(Path(path).expanduser().absolute()))
    except (CheckpointError, OSError):
        return ""  # whoever opens it says why
    return "" if manifest is None else f"{manifest.kind} {manifest.token}"


def _opened_by_rank_0(comm: Comm, path: str | Path, wish: Wish, stack: ExitStack) -> Found:
    """A collective."""
    opened: list[Found] = []

    def open_it() -> str:
        opened.append(_opened(path, wish, stack, 0))
        return opened[0].encode()

    text = by_rank_0(comm, "opening", open_it)
    return opened[0] if opened else Found.decode(text)


def _opened(path: str | Path, wish: Wish, stack: ExitStack, rank: int) -> Found:
    with _understood(path):
        found = open_found(path, wish, stack)
    source = found.source
    if source.manifest is None:
        _check_foreign(source)
    elif rank == 0:
        for name, record in source.manifest.files.items():
            if not name.endswith(".safetensors"):  # config.json: others read what we do not
                for _ in source.read(name, 0, record.size):
                    pass
    return found


def _check_identity(comm: Comm, found: Found) -> None:
    """Every rank must have opened the same checkpoint."""
    here = f"{found.identity} on {socket.gethostname()}"
    said = share(comm, here, "identity of a checkpoint")
    first = said[0].rpartition(" on ")[0]
    other = {rank: text for rank, text in enumerate(said) if text.rpartition(" on ")[0] != first}
    if other:
        raise CheckpointError(
            f"the ranks opened different checkpoints: rank 0 {said[0]}; "
            f"{one_message(other, comm.size)}. The path means another folder on each host. Nothing "
            "of it was used. Load one that all hosts have."
        )


def _check_foreign(source: Source) -> None:
    """A folder without a manifest must not be one of ours that has lost it, or never had it."""
    if is_leftover(source.folder.name) or source.has(state.NAME):
        raise DamagedCheckpoint(
            f"{source.folder} has no {manifest.NAME}, and shardwise began it, so it was not "
            "written to its end or was damaged since. Nothing of it was used. Load another "
            "checkpoint; or, for its weights as they are, one of its safetensors files."
        )


def resume(sharded: ShardedModel, run: str | Path, wish: Wish) -> Loaded | None:
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
        name = by_rank_0(comm, "checkpoint to resume", lambda: _candidate(folder, damaged))
        if not name:
            together(comm, "nothing to resume", lambda: _check_nothing(folder))
            return None
        try:
            report = load(sharded, folder / name, wish)
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
    found = saved_in(folder)
    for path, reason in found.skipped:
        if path.name not in damaged:
            damaged[path.name] = reason
            log.warning("SKIPPED %s, which is not complete: %s", path, reason)
    for path, _ in found.complete:
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
            if any((folder / name / file).exists() for file in (manifest.NAME, state.NAME)):
                log.warning("damaged %s renamed to %s", name, mark_broken(folder / name).name)
        if target_of(folder) in damaged:
            move_latest(folder / loaded)
    except (CheckpointError, OSError) as error:
        log.warning("%s: what is broken there could not be renamed: %s", folder, error)


def _fitted(sharded: ShardedModel, found: Found, wish: Wish) -> Fitted:
    with _understood(found.source.folder):
        return Fitted(sharded, found, wish)


def _restored(found: Found, fitted: Fitted, wish: Wish) -> Loaded:
    with _understood(found.source.folder, REPLACED):
        fitted.apply(wish.training)
        return fitted.report()


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


def _fill(comm: Comm, source: Source, wants: list[Want]) -> None:
    fill(source, wants, comm.rank, comm.size)


def _read(found: Found, fitted: Fitted, read: Callable[[Source, list[Want]], object]) -> None:
    try:
        read(found.source, fitted.wants)
    except CheckpointError as error:
        raise type(error)(
            f"{error} {REPLACED}: load another checkpoint before you use it."
        ) from error
