"""Checkpoints of kind ``"full"``: rank 0 writes all of it, and nobody else needs the disk.

What the others hold reaches rank 0 a few megabytes at a time, in the order of the file, as the
edges of pages do in other saves; so no rank ever holds more of the model than its shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.plan import cut_at_blocks
from shardwise.checkpoint.segments import Segments, exchange_edges, rounds
from shardwise.checkpoint.writer import Chunk, Part, Writer
from shardwise.comm.protocol import Comm

__all__ = ["write_gathered"]


def write_gathered(comm: Comm, folder: Path, contents: Contents) -> Part:
    """Write everything from rank 0. A collective; what goes wrong is said in the part."""
    if comm.rank:
        for _ in _chunks(comm, contents):
            pass  # what rank 0 needs of this rank was sent
        return Part({})
    failed: Part | None = None
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(folder, 0, contents.total(0)))
        for chunk in _chunks(comm, contents):
            try:
                if failed is None:
                    writer.write(chunk)
            except Exception as error:  # noqa: BLE001 - the others go on sending: so must this rank
                failed = Part.failed(error)
        try:
            return failed or writer.finish()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            return Part.failed(error)


def _chunks(comm: Comm, contents: Contents) -> Iterator[Chunk]:
    """Rank 0's bytes of every file, in order, as they arrive; on other ranks none."""
    for segments in contents.segments:
        plan = segments.plan
        at = len(plan.header)
        for some in rounds(plan.moves, comm.size):
            part = segments.with_moves(plan.moves[some.start : some.stop])
            exchange_edges(comm, [part])
            stop = part.plan.moves[-1].stop
            yield from _between(part, at, stop) if comm.rank == 0 else ()
            at = stop
        yield from _between(segments, at, plan.size) if comm.rank == 0 else ()


def _between(segments: Segments, start: int, stop: int) -> Iterator[Chunk]:
    for first, last in cut_at_blocks(start, stop):
        yield Chunk(segments.plan.name, first, last, tuple(segments.between(first, last)))
