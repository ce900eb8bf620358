"""The bytes of each file: what is stored, who writes it, who reads it. Pure numbers.

Tensors lie in a file in the order of their slots, so a rank's shard of a bucket is *one* range of
the file, with the padding left out, and nothing has to be gathered.

    file    | header · | a0 a1 a2 a3 a4 a5 b0 b1 | c0 c1 …
    held by            | rank 0      | rank 1    |
    pages   |----------|----------|----------|----------|     4 KiB each
    written by  rank 0 |  rank 0     ·····| rank 1

A page has one writer, the rank that holds its first byte. What others hold of that page (the
dots) moves to the writer beforehand: 4 KiB per boundary at most. File systems keep pages whole
in memory, and those of networks do not merge what two hosts wrote into one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from shardwise.checkpoint.safetensors_format import INNER, PAGE, Stored, dtype_of, encode
from shardwise.comm.garbage import uncollected
from shardwise.errors import CheckpointError
from shardwise.plan.layout.layout import cut_at_multiples, up

INDEX = ".safetensors.index.json"
STATE = {"optimizer", "ranks", "rest"}
"""Kinds of files that lie in ``training/``, where no reader of weights meets them."""
BLOCK, LEAST = 4 << 20, 256 << 10
"""Bytes that have one checksum: what a reader must read to be sure of any of them. At most, and at
least: see ``block_size``."""


class Held(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor, and which ranks hold them, all alike."""

    start: int
    stop: int
    ranks: tuple[int, ...]


class Span(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and the rank that writes them."""

    start: int
    stop: int
    rank: int


class Move(NamedTuple):
    """Bytes ``[start, stop)`` of a file that ``writer`` writes, and ``source`` holds."""

    start: int
    stop: int
    source: int
    writer: int


class Entry(NamedTuple):
    """A tensor to be stored."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]  # whole and unpadded
    held: tuple[Held, ...]  # who holds which elements, from the first to the last without a gap
    # Is it whole on every rank, though only those that ``held`` names store it?
    everywhere: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class FilePlan:
    """One file before it is written."""

    name: str
    header: bytes  # its first bytes; rank 0 writes them, last of all
    tensors: Mapping[str, Stored]  # where each lies, in order
    spans: tuple[Span, ...]  # who writes what, in order, each from the start of a page
    moves: tuple[Move, ...]  # what must reach its writer first
    block: int = BLOCK  # bytes that have one checksum

    @cached_property
    def size(self) -> int:
        return max([len(self.header), *(stored.stop for stored in self.tensors.values())])

    @cached_property
    def digest(self) -> str:
        """Return a digest of what must be the same on every rank."""
        text = hashlib.sha256(self.header)
        text.update(repr((self.spans, self.block)).encode())
        return text.hexdigest()[:12]

    def chunks(self, rank: int) -> Iterator[tuple[int, int]]:
        """The ranges that ``rank`` writes, in order, each of ``BLOCK`` bytes at most."""
        for start, stop, writer in self.spans:
            if writer == rank:
                yield from cut_at_multiples(start, stop, BLOCK)


def block_size(entries: Iterable[Entry]) -> int:
    """A sixteenth of what a rank holds of one bucket, on average, but ``LEAST`` to ``BLOCK``.

    A rank reads whole blocks, so where its ranges are as short as blocks it reads twice what it
    needs. Blocks that are smaller than needed cost time for each.
    """
    nbytes, ranges, holders = 0, 1, None
    for entry in entries:
        nbytes += entry.nbytes
        for _, _, ranks in entry.held:
            ranges += ranks != holders
            holders = ranks
    return min(BLOCK, max(LEAST, 1 << (nbytes // ranges // 16).bit_length()))


def plan_files(
    stem: str, entries: Sequence[Entry], limit: int, one_writer: bool = False, block: int = BLOCK
) -> tuple[FilePlan, ...]:
    """Files that hold ``entries``, the same on every rank.

    Wider dtypes come first, so that every tensor lies at a multiple of its own item size;
    otherwise the order is that of ``entries``.

    Args:
        stem: ``"model"`` gives ``model.safetensors``, or ``model-00001-of-00003.safetensors``, and
            ``"optimizer"`` gives ``training/optimizer.safetensors``.
        limit: bytes of tensors in a file at most, unless one tensor alone has more.
        one_writer: rank 0 writes all of it, and everything else moves there, block by block.
    """
    return _planned(stem, tuple(entries), limit, one_writer, block)


@lru_cache(maxsize=8)  # every save of a run has the same layout
def _planned(
    stem: str, entries: tuple[Entry, ...], limit: int, one_writer: bool, block: int
) -> tuple[FilePlan, ...]:
    _check_names(entries)
    ordered = sorted(entries, key=lambda entry: -dtype_of(entry.dtype).itemsize)
    parts: list[list[Entry]] = []
    room = 0
    for entry in ordered:
        if not parts or entry.nbytes > room:
            parts.append([])
            room = limit
        parts[-1].append(entry)
        room -= entry.nbytes
    names = _file_names(stem, len(parts))
    with uncollected():  # planning makes hundreds of thousands of tuples that stay
        return tuple(_plan(*part, one_writer, block) for part in zip(names, parts, strict=True))


def index_files(plans: Mapping[str, Sequence[FilePlan]]) -> dict[str, bytes]:
    """``model.safetensors.index.json``, as Hugging Face libraries read it, for several files."""
    several = {stem: files for stem, files in plans.items() if len(files) > 1}
    return {f"{place_of(stem)}{INDEX}": _index(*files) for stem, files in several.items()}


@lru_cache(maxsize=8)
def _index(*files: FilePlan) -> bytes:
    weights = {name: file.name.rpartition("/")[2] for file in files for name in file.tensors}
    total = sum(s.stop - s.start for file in files for s in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def _check_names(entries: Sequence[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen or entry.name == "__metadata__":
            raise CheckpointError(
                f"two tensors would be stored as {entry.name!r}, so one of them would be lost. "
                "Rename the parameter or buffer."
            )
        seen.add(entry.name)


def place_of(stem: str) -> str:
    """``"model"``, and ``"training/optimizer"``: what the names of a stem's files begin with."""
    return f"{INNER}/{stem}" if stem in STATE else stem


def _file_names(stem: str, count: int) -> list[str]:
    stem = place_of(stem)
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]


def _plan(name: str, entries: Sequence[Entry], one_writer: bool, block: int) -> FilePlan:
    header = encode([(e.name, e.dtype, e.shape) for e in entries])
    tensors, at = {}, len(header)
    for entry in entries:
        tensors[entry.name] = Stored(entry.dtype, entry.shape, at, at + entry.nbytes)
        at += entry.nbytes
    parts = _parts(_runs(entries, tensors))
    spans = [Span(len(header), at, 0)] if one_writer and parts else _by_page(parts)
    moves = _moves(spans, parts)
    if one_writer:  # the bytes of whole shards move, which rank 0 takes block by block
        moves = (
            Move(*ends, source, writer)
            for start, stop, source, writer in moves
            for ends in cut_at_multiples(start, stop, block)
        )
    return FilePlan(name, header, tensors, tuple(spans), tuple(moves), block)


def _runs(entries: Sequence[Entry], tensors: Mapping[str, Stored]) -> list[Held]:
    """Ranges of the file's bytes by who holds them; equal neighbours are one."""
    runs: list[Held] = []
    holders: tuple[int, ...] = ()  # of the last one, which may grow
    start, stop = 0, 0
    for entry in entries:
        first, item = tensors[entry.name].start, dtype_of(entry.dtype).itemsize
        for begin, end, ranks in entry.held:
            if begin == end:
                continue
            if ranks != holders:
                runs.append(Held(start, stop, holders))
                start, holders = first + begin * item, ranks
            stop = first + end * item
    runs.append(Held(start, stop, holders))
    return runs[1:]


def _parts(runs: Iterable[Held]) -> list[Held]:
    """Assign parts to writers, before pages are looked at: each to the first rank that holds it."""
    parts: list[Held] = []
    for run in runs:
        if len(run.ranks) == 1:
            parts.append(run)
        else:
            parts += _shared_out(run)
    return parts


def _shared_out(run: Held) -> Iterator[Held]:
    """Ranks that hold the same run write equal parts of it, in whole pages."""
    length, count, at = run.stop - run.start, len(run.ranks), run.start
    for k in range(count):
        end = min(run.stop, up(run.start + length * (k + 1) // count, PAGE))
        if at < end:
            yield Held(at, end, (*run.ranks[k:], *run.ranks[:k]))
            at = end


def _by_page(parts: Sequence[Held]) -> list[Span]:
    """Give each whole page to the rank that its first byte belongs to."""
    spans: list[Span] = []
    last = parts[-1].stop if parts else 0
    at, first, writer = 0, 0, -1  # the end of the last span, its start and its rank
    for start, stop, ranks in parts:
        rank = ranks[0]
        if stop <= at:  # it ends in a page that begins with another rank's bytes
            continue
        if rank != writer:
            if writer >= 0:
                spans.append(Span(first, at, writer))
            first, writer = max(start, at), rank
        at = min(up(stop, PAGE), last)
    if writer >= 0:
        spans.append(Span(first, at, writer))
    return spans


def _moves(spans: Sequence[Span], parts: Iterable[Held]) -> Iterator[Move]:
    """The bytes that their writer does not hold, in the order of the file."""
    number = 0
    for start, stop, ranks in parts:
        at = start
        while at < stop:
            while spans[number].stop <= at:
                number += 1
            end = min(stop, spans[number].stop)
            if (writer := spans[number].rank) not in ranks:
                yield Move(at, end, ranks[0], writer)
            at = end
