"""Short values that ranks send each other: over their comm, or through files in a folder.

A save in the background must not use the comm, since the steps do; there, every rank leaves a file
beside the data, and rank 0 looks for them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, cast

import torch

from shardwise import errors
from shardwise.checkpoint.disk import explained, text_of, write_file
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.watchdog.desync import by_ranks, differing_facts, format_ranks
from shardwise.errors import CheckpointError, RanksDisagree, ShardwiseError

T = TypeVar("T")

FIRST = 120  # bytes of a text that all ranks send with its length
SHORT = 4096  # and of one that all send at once where one is longer; the rest of that goes alone

PATIENCE = 1800.0  # seconds without a new part, after which a rank counts as gone
NAPS = 0.02, 0.5  # seconds between two looks, the first and the longest


def all_gather_object(comm: Comm, value: T, what: str) -> list[T]:
    """Every rank's ``value``, which JSON can write, by rank. A collective; ``what`` names it.

    A gather alone would pad all texts to the longest: if one of 256 ranks sends 8 MB, each would
    need 2 GB. So only the beginnings are gathered, and the rest is broadcast.
    """
    data, length = json.dumps(value).encode(), 8
    first = len(data).to_bytes(length, "little") + data[:FIRST]
    gathered = _all_gather_bytes(comm, first, length + FIRST, what)
    counts = [int.from_bytes(row[:length], "little") for row in gathered]
    width, begins = FIRST, [row[length:] for row in gathered]
    if max(counts) > FIRST:
        width = min(SHORT, max(counts))
        begins = _all_gather_bytes(comm, data[:width], width, what)
    values = []
    for rank, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        text = begin[:count]
        if count > width:
            rest = torch.empty(count - width, dtype=torch.uint8, device=comm.device)
            if rank == comm.rank:
                rest.copy_(torch.frombuffer(bytearray(data[width:]), dtype=torch.uint8))
            comm.broadcast(rest, rank, Label("broadcast", what)).wait()
            text += rest.cpu().numpy().tobytes()
        values.append(json.loads(text))
    return values


def _all_gather_bytes(comm: Comm, data: bytes, width: int, what: str) -> list[bytes]:
    """Every rank's ``data``, padded to ``width``, by rank. A collective."""
    padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
    rows = comm.gather_rows(padded.to(comm.device), Label("gather", what))
    return [row.tobytes() for row in rows.cpu().numpy()]


def broadcast_object(comm: Comm, value: T, what: str) -> T:
    """Rank 0's ``value``, which JSON can write, on every rank. A collective."""
    return cast("T", all_gather_object(comm, value if comm.rank == 0 else None, what)[0])


def run_on_rank_0(comm: Comm, what: str, act: Callable[[], T]) -> T:
    """Return on every rank what ``act()`` returns on rank 0, which alone calls it. A collective.

    Raises as ``raise_on_all`` does.
    """
    on_rank_0 = act if comm.rank == 0 else lambda: None
    _, results = agreed(comm, what, on_rank_0, share=lambda result: result)
    return cast("T", results[0])


def raise_on_all(comm: Comm, what: str, act: Callable[[], T]) -> T:
    """``act()`` on every rank; if it fails on any, all raise, naming each rank. A collective.

    Raises:
        ShardwiseError: of the class that all ranks that failed raised; a ``CheckpointError`` where
            these differ, or are not ours.
    """
    return agreed(comm, what, act)[0]


def agreed(
    comm: Comm,
    what: str,
    act: Callable[[], T],
    facts: Callable[[T], Mapping[str, str]] = lambda _: {},
    share: Callable[[T], Any] = lambda _: None,
) -> tuple[T, list[Any]]:
    """The result of ``act()``, and what each rank shares of its own. A collective: one gather.

    Args:
        facts: of the result, alike on all ranks.
        share: of the result, what JSON can write.

    Raises:
        CheckpointError: a fact differs; the ranks can go on together, unlike after ``comm.agree``.
        ShardwiseError: as ``raise_on_all``.
    """
    result: list[T] = []
    failure: Exception | None = None
    outcome, digest, shared = ("", ""), "", None
    try:
        result.append(act())
        text, shared = json.dumps(dict(facts(result[0]))), share(result[0])
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]  # a row is to fit in ``FIRST``
    except RanksDisagree:  # after it no collective works
        raise
    except Exception as error:  # noqa: BLE001 - raised again, on all ranks
        kind = type(error) if isinstance(error, ShardwiseError) else CheckpointError
        failure, outcome = error, (kind.__name__, text_of(error))
    rows = all_gather_object(comm, (*outcome, digest, shared), what)
    if kinds := {kind for kind, *_ in rows if kind}:
        texts = {rank: text for rank, (kind, text, *_) in enumerate(rows) if kind}
        error_class = getattr(errors, kinds.pop() if len(kinds) == 1 else "", CheckpointError)
        raise error_class(joined_message(texts, comm.size)) from failure
    if len({digest for _, _, digest, _ in rows}) > 1:
        differing = differing_facts(all_gather_object(comm, dict(facts(result[0])), "facts"))
        raise CheckpointError(
            "the ranks would save different values:\n"
            + "\n".join(differing)
            + "\nNothing was written. Pass the same on every rank; what differs by rank belongs in "
            "Training(local=...)."
        )
    return result[0], [shared for *_, shared in rows]


def joined_message(failed: Mapping[int, str], world: int) -> str:
    """The messages of several ranks, each once, with its ranks."""
    if len(failed) == world and len(set(failed.values())) == 1:
        return failed[0]
    return "\n".join(by_ranks(failed))


# --- without the comm ------------------------------------------------------------------------


def _part(folder: Path, rank: int) -> Path:
    return folder / f".part-{rank:05d}.json"


def leave_part(folder: Path, rank: int, value: Any) -> None:
    """Write this rank's value for rank 0, whole or not at all."""
    path = _part(folder, rank)
    unfinished = path.with_suffix(".tmp")
    write_file(unfinished, json.dumps(value).encode())
    unfinished.replace(path)


def await_parts(
    folder: Path, world: int, cancelled: Event, patience: float = PATIENCE
) -> list[Any]:
    """Every rank's value, by rank; the files are removed. On rank 0.

    Raises ``CheckpointError`` after ``patience`` seconds without a further value, if cancelled, or
    at once if the folder is no longer there.
    """
    values: dict[int, Any] = {}
    nap, longest = NAPS
    last = time.monotonic()
    while len(values) < world:
        for rank in set(range(world)) - set(values):
            with explained(f"looking for what rank {rank} left in {folder.name}"):
                if (path := _part(folder, rank)).exists():
                    values[rank] = json.loads(path.read_bytes())
                    path.unlink()
                    last, nap = time.monotonic(), NAPS[0]
        absent = [rank for rank in range(world) if rank not in values]
        if absent and not folder.is_dir():
            raise CheckpointError(
                f"{folder} was renamed, removed or unmounted while it was being written, so "
                f"{format_ranks(absent)} of {world} cannot be waited for, and this checkpoint is "
                "given up. Leave the folder of a run where it is until its saves are complete."
            )
        if absent and time.monotonic() - last > patience:
            raise CheckpointError(
                f"{folder}: {format_ranks(absent)} of {world} did not finish writing within "
                f"{patience:,.0f} s after the last that did, so this checkpoint is given up. Check "
                "whether that rank is still running, and whether its host can reach the disk."
            )
        if absent and cancelled.wait(nap):
            raise CheckpointError(
                f"{folder}: this save was given up; {format_ranks(absent)} was absent."
            )
        nap = min(longest, 1.5 * nap)
    return [values[rank] for rank in range(world)]
