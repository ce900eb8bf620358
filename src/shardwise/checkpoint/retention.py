"""Which checkpoints of a run stay: those that were saved last, and some whatever their age.

What was just published stays, and what the run goes on from, which is known to be good. Only
complete checkpoints are counted and removed; what a resume found damaged has another name by then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shardwise.checkpoint.complete import Checkpoint, read_manifest, saved_in
from shardwise.checkpoint.folder import LATEST, remove, resolve, step_of
from shardwise.errors import CheckpointError

__all__ = ["Retention", "moment_of", "retire", "surplus"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Retention:
    """What stays.

    Attributes:
        limit: how many, at least 1; those that stay in any case count.
        best: the one with the ``"lowest"`` or ``"highest"`` metric stays; or ``None``.
        tokens: of those that stay in any case.
    """

    limit: int
    best: str | None = None
    tokens: Collection[str] = ()


def surplus(complete: Sequence[Checkpoint], keep: Retention) -> list[Path]:
    """Which of these, the newest first, go. Pure."""
    measured = [one for one in complete if one.manifest.metric is not None]
    measured.sort(key=lambda one: one.manifest.metric or 0.0, reverse=keep.best == "highest")
    staying = {one.path for one in complete if one.manifest.token in keep.tokens}
    staying |= {one.path for one in measured[:1] if keep.best}
    others = [one.path for one in complete if one.path not in staying]
    return others[max(keep.limit - len(staying), 0) :]


def retire(run: Path, keep: Retention) -> tuple[str, ...]:
    """Let old ones go; their names. That this fails is no reason to lose the new one."""
    gone = []
    try:
        complete = saved_in(run).complete
    except CheckpointError as error:
        log.warning("no old checkpoint of %s was removed: %s", run, error)
        return ()
    for path in surplus(complete, keep):
        try:
            remove(path)
            gone.append(path.name)
        except OSError as error:
            log.warning("%s is no longer needed and could not be removed: %s", path, error)
    return tuple(gone)


def moment_of(final: Path) -> str:
    """Now; but later than the last checkpoint of the run says, since the clocks of hosts differ."""
    now = datetime.now(UTC)
    if step_of(final.name) is not None:
        with suppress(CheckpointError, OSError, ValueError):  # there may be none
            if before := read_manifest(resolve(final.with_name(LATEST))):
                now = max(now, datetime.fromisoformat(before.created) + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")
