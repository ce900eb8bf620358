"""Checkpoints of kind ``"full"``: rank 0 writes all of it, and nobody else needs the disk.

What the others hold reaches rank 0 a few megabytes at a time, in the order of the file, as the
edges of pages do in other saves; so no rank ever holds more of the model than its shard. Where
the ranks that load it do not all see it, rank 0 reads it block by block, and every rank takes its
part of each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.plan import cut_at_blocks
from shardwise.checkpoint.read_requests import ReadRequest
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.save_plan import SavePlan
from shardwise.checkpoint.segments import Segments, exchange_edges, rounds
from shardwise.checkpoint.writer import Chunk
from shardwise.comm.protocol import Comm, Label


def gathered(comm: Comm, contents: SavePlan) -> Iterator[Chunk]:
    """Rank 0's bytes of every file, in order, as they arrive; on other ranks none. Collectives."""
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
    for first, last in cut_at_blocks(start, stop, segments.plan.block):
        yield Chunk(segments.plan.name, first, last, tuple(segments.between(first, last)))


def read_from_rank_0(comm: Comm, source: CheckpointReader, requests: Iterable[ReadRequest]) -> None:
    """Fill every rank's ``requests`` from files that rank 0 alone can read. A collective.

    Args:
        source: the checkpoint; other ranks than 0 take only sizes from it.
    """
    by_file: dict[str, list[ReadRequest]] = {}
    for request in requests:
        by_file.setdefault(request.place.file, []).append(request)
    asked = all_gather_object(comm, list(by_file), "files that are read")
    for name in sorted({name for names in asked for name in names}):
        assert source.manifest is not None  # a folder of this kind has one
        size, length = source.manifest.files[name].size, source.manifest.block
        for start, stop in cut_at_blocks(0, size, length):
            # The last byte says whether rank 0 could read the others.
            block = torch.zeros(stop - start + 1, dtype=torch.uint8)
            try:
                if comm.rank == 0:
                    source.read_into(name, start, block[:-1].numpy())
                    block[-1] = 1
            finally:
                sent = block.to(comm.device)
                comm.broadcast(sent, 0, Label("broadcast", name)).wait()
            if not sent[-1]:
                return
            for request in by_file.get(name, ()):
                _take(request, start, sent[:-1])


def _take(request: ReadRequest, start: int, block: Tensor) -> None:
    """Copy what is wanted of the bytes that begin at ``start`` of the file.

    Tensors lie at multiples of their item size, so no element is cut in two.
    """
    first, item = request.at[1], request.dtype.itemsize
    begin, end = max(start, first), min(start + len(block), first + request.nbytes)
    if begin < end:
        part = block[begin - start : end - start].view(request.dtype)
        request.out[(begin - first) // item : (end - first) // item].copy_(part)
