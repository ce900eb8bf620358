"""How ranks tell each other short texts: over their comm, or through files in a folder.

While training stands still there is the comm, and a rank that died is found at once. A save in the
background must not use it, since the steps do; there, every rank leaves a file beside the data,
and rank 0 looks for them, with a limit to its patience and names for whom it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from shardwise.checkpoint.disk import explained, write_file
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError

__all__ = ["await_parts", "from_rank_0", "leave_part", "share", "together"]

T = TypeVar("T")

PATIENCE = 1800.0  # seconds without a new part, after which a rank counts as gone
NAPS = 0.02, 0.5  # seconds between two looks, the first and the longest


def share(comm: Comm, text: str, what: str) -> list[str]:
    """Every rank's ``text``, by rank. A collective; ``what`` names it."""
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
    lengths[comm.rank] = len(data)
    comm.all_gather(lengths, Label("gather", f"lengths of {what}")).wait()
    counts = [int(count) for count in lengths.tolist()]
    width = max(counts)
    full = torch.zeros(comm.size, width, dtype=torch.uint8, device=comm.device)
    full[comm.rank, : len(data)] = data.to(comm.device)
    comm.all_gather(full.view(-1), Label("gather", what)).wait()
    rows = full.cpu().numpy()
    return [rows[r, : count - 1].tobytes().decode() for r, count in enumerate(counts)]


def from_rank_0(comm: Comm, text: str, what: str) -> str:
    """Rank 0's ``text`` on every rank; the others' is not looked at. A collective."""
    return share(comm, text if comm.rank == 0 else "", what)[0]


def together(
    comm: Comm, what: str, act: Callable[[], T], kind: type[CheckpointError] = CheckpointError
) -> T:
    """``act()`` on every rank; if it fails on any, all raise, naming each rank. A collective.

    Raises:
        CheckpointError: the ranks' own, in one of this ``kind``.
    """
    result: list[T] = []
    said = ""
    try:
        result.append(act())
    except CheckpointError as error:
        said = str(error)
    failed = {rank: text for rank, text in enumerate(share(comm, said, what)) if text}
    if failed:
        raise kind(one_message(failed, comm.size))
    return result[0]


def one_message(failed: dict[int, str], world: int) -> str:
    """What ranks said, each thing once, with the ranks that said it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failed.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(failed) == world:
        return next(iter(ranks))
    told = [f"{_named(those)}: {text}" for text, those in ranks.items()]
    return "\n".join(told)


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', …' * (len(ranks) > 8)}"


# --- without the comm ------------------------------------------------------------------------


def _part(folder: Path, rank: int) -> Path:
    return folder / f".part-{rank:05d}.json"


def leave_part(folder: Path, rank: int, text: str) -> None:
    """Leave this rank's text for rank 0, whole or not at all."""
    path = _part(folder, rank)
    unfinished = path.with_suffix(".tmp")
    write_file(unfinished, text.encode())
    unfinished.replace(path)


def await_parts(
    folder: Path, world: int, cancelled: Event, patience: float = PATIENCE
) -> list[str]:
    """Every rank's text, by rank; the files are gone afterwards. Rank 0's.

    Raises:
        CheckpointError: for ``patience`` seconds no further rank left its text, or ``cancelled``.
    """
    found: dict[int, str] = {}
    nap, longest = NAPS
    last = time.monotonic()
    while len(found) < world:
        for rank in set(range(world)) - set(found):
            with explained(f"looking for what rank {rank} left in {folder.name}"):
                if (path := _part(folder, rank)).exists():
                    found[rank] = path.read_text("utf-8")
                    path.unlink()
                    last, nap = time.monotonic(), NAPS[0]
        absent = [rank for rank in range(world) if rank not in found]
        if absent and time.monotonic() - last > patience:
            raise CheckpointError(
                f"{folder}: {_named(absent)} of {world} did not finish writing within "
                f"{patience:,.0f} s after the last that did, so this checkpoint is given up. Look "
                "whether that rank still lives, and whether its host still reaches the disk."
            )
        if absent and cancelled.wait(nap):
            raise CheckpointError(f"{folder}: this save was given up; {_named(absent)} was absent.")
        nap = min(longest, 1.5 * nap)
    return [found[rank] for rank in range(world)]
