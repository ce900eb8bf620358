"""Who keeps which folder: one name, and as many folders as there are hosts that share no disk.

    shared by all     rank 0 makes the folder, every rank sees it: rank 0 keeps it for all
    local to hosts    rank 0 makes it, ranks 4 to 7 do not see it: rank 4 makes it there, too

The rank that made the folder which a rank sees is its keeper. A keeper makes the files of the ranks
that it keeps, finishes them, and gives the folder its name.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.complete import check_complete
from shardwise.checkpoint.folder import Partial, remove, steps
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.meeting import one_message, share, together
from shardwise.comm.protocol import Comm
from shardwise.errors import CheckpointError

__all__ = ["Hold", "beginning", "on_all_hosts", "take_back"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Hold:
    """One rank's hold on the folder that it sees.

    Attributes:
        partial: the folder, on a rank that keeps one.
        keepers: by rank: who keeps the folder that this rank sees.
    """

    partial: Partial | None
    keepers: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Are there several folders, each local to a host?"""
        return len(set(self.keepers)) > 1

    def ranks(self, keeper: int) -> tuple[int, ...]:
        """Whom ``keeper`` keeps."""
        return tuple(rank for rank, its in enumerate(self.keepers) if its == keeper)


def beginning(comm: Comm, folder: Path, make: Callable[[], Partial], kind: str) -> Hold:
    """Make ``folder`` wherever a rank would not see it. A collective.

    Args:
        make: makes the folder in this rank's view.
        kind: of the checkpoint; all but ``"local"`` need one folder, and rank 0 has made it.

    Raises:
        CheckpointError: on every rank alike; nothing is left behind.
    """
    partial: Partial | None = None
    keepers: dict[int, int] = {}
    try:
        while len(keepers) < comm.size:
            maker = min(set(range(comm.size)) - set(keepers))
            act = make if comm.rank == maker else _nothing
            partial = together(comm, "beginning", act) or partial
            if kind == "full":  # then only rank 0 needs to see it
                return Hold(partial, (0,) * comm.size)
            seen = comm.rank in keepers or comm.rank == maker or folder.is_dir()
            here = f"on {socket.gethostname()}, {folder.parent}"
            blind = share(comm, "" if seen else here, "looking")
            if kind != "local":
                _check_shared(blind)
            keepers = {r: keepers.get(r, maker) for r, where in enumerate(blind) if not where}
    except BaseException:
        if partial is not None:
            partial.abandon()
        raise
    return Hold(partial, tuple(keepers[rank] for rank in range(comm.size)))


def _nothing() -> None:
    return None


def _check_shared(blind: Sequence[str]) -> None:
    told = {
        rank: f"{where} does not show the folder that rank 0 has just made there: it is local to "
        "each host, not a shared file system. A checkpoint of this kind is one folder that every "
        "rank writes to. Save to a path that all hosts share; or with kind='local', which keeps "
        "each rank's shards on its own host, for the same ranks on the same hosts."
        for rank, where in enumerate(blind)
        if where
    }
    if told:
        raise CheckpointError(one_message(told, len(blind)))


def on_all_hosts(comm: Comm, run: Path, hold: Hold) -> frozenset[str] | None:
    """Names of the checkpoints that every host has, complete and of one save. A collective.

    Returns:
        ``None`` where there is one folder: what is there is there.
    """
    if not hold.is_split:
        return None
    here = _complete(run) if hold.partial is not None else {}
    said: list[dict[str, str]] = [
        json.loads(text) for text in share(comm, json.dumps(here), "complete checkpoints")
    ]
    first, *others = (said[keeper] for keeper in sorted(set(hold.keepers)))
    return frozenset(n for n, token in first.items() if all(o.get(n) == token for o in others))


def _complete(run: Path) -> Mapping[str, str]:
    found = {}
    for path in steps(run):
        try:
            found[path.name] = check_complete(path).token
        except CheckpointError:
            continue  # what is broken is left for a person to look at
    return found


def take_back(final: Path, token: str) -> None:
    """Remove what this save published here, since another host could not publish its part."""
    try:
        made: Manifest = check_complete(final)
        if made.token == token:
            remove(final)
    except (CheckpointError, OSError) as error:
        log.warning("%s is not complete on all hosts, and stays: %s", final, error)
