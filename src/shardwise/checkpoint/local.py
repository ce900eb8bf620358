"""Checkpoints of kind ``"local"``: each rank's own shards in its own files, as they are.

    model.rank0.safetensors   model.rank1.safetensors   optimizer.rank0.safetensors …

Every tensor is flat, ``[n]``: the rank's piece, and the file's header says of which whole and from
which element on. What all ranks have alike is in the file of each, so a rank needs no other's, and
each host may have a folder of its own. Only the same layout can take the pieces back, so it is
stored, too (``layout.json``), with the shapes of the wholes, and another one is refused.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.checkpoint.accumulated import GRADIENTS
from shardwise.checkpoint.dtypes import itemsize
from shardwise.checkpoint.header import Stored
from shardwise.checkpoint.holdings import Holding, homes
from shardwise.checkpoint.plan import Entry, FilePlan, Held, plan_files
from shardwise.checkpoint.segments import Segments
from shardwise.checkpoint.source import Place, Source
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.checkpoint.fit import Found
    from shardwise.sharded import Sharded

__all__ = ["LAYOUT", "check_own", "is_local", "layout_file", "layout_of", "local_files", "placed"]

LAYOUT = "layout.json"
WHOLES = "wholes"  # what ``LAYOUT`` calls the table of dtypes and shapes, by stem
PIECES = "pieces"  # what a header's free text calls the table of pieces
STEMS = ("model", "optimizer", "ranks", GRADIENTS)
WHOLE = 1 << 62  # bytes: a rank has one file of each kind, however large


def layout_of(sharded: Sharded) -> dict[str, Any]:
    """What must be the same to take pieces back: ranks, strategy, units and their buckets."""
    units: dict[str, list[int]] = {}
    for bucket in sharded.buckets:
        units.setdefault(bucket.unit or "(root)", []).append(bucket.layout.numel)
    return {"world": sharded.comm.size, "strategy": sharded.placement.name, "units": units}


# --- to save ---------------------------------------------------------------------------------


def layout_file(sharded: Sharded, groups: Mapping[str, Sequence[Holding]]) -> bytes:
    """``LAYOUT``: the layout, and each stem's tensors, of some of which a rank holds nothing."""
    wholes = {
        stem: {h.entry.name: [h.entry.dtype, list(h.entry.shape)] for h in group}
        for stem, group in groups.items()
    }
    return json.dumps({**layout_of(sharded), WHOLES: wholes}, indent=1).encode() + b"\n"


def local_files(
    stem: str, group: Sequence[Holding], rank: int, world: int
) -> tuple[list[FilePlan], list[Segments]]:
    """The files of every rank for one stem, and this rank's bytes of its own."""
    plans: list[FilePlan] = []
    segments: list[Segments] = []
    mine = {holding.entry.name: holding for holding in group}
    for owner in range(world):
        found = [(h.entry, held) for h in group if (held := _held(h.entry, owner)) is not None]
        pieces = {entry.name: (list(entry.shape), held.start) for entry, held in found}
        entries = [_piece(entry, held, owner) for entry, held in found]
        about = {"format": "pt", PIECES: json.dumps(pieces, separators=(",", ":"))}
        for plan in plan_files(f"{stem}.rank{owner}", entries, WHOLE, about):
            plans.append(replace(plan, owner=owner))
            here = plan if owner == rank else replace(plan, tensors={})
            segments.append(Segments(here, _own(here, mine)))
    return plans, segments


def _held(entry: Entry, rank: int) -> Held | None:
    if entry.everywhere:
        return Held(0, prod(entry.shape), (rank,))
    return next((held for held in entry.held if rank in held.ranks), None)


def _piece(entry: Entry, held: Held, rank: int) -> Entry:
    size = held.stop - held.start
    return Entry(entry.name, entry.dtype, (size,), (Held(0, size, (rank,)),) if size else ())


def _own(plan: FilePlan, mine: Mapping[str, Holding]) -> dict[str, Holding]:
    return {name: replace(mine[name], start=0) for name in plan.tensors}


# --- to load ---------------------------------------------------------------------------------


def is_local(source: Source) -> bool:
    """Is it of this kind?"""
    return source.manifest is not None and source.manifest.kind == "local"


def check_own(source: Source, rank: int) -> None:
    """Raises ``CheckpointError`` where a file of this rank's cannot be read at all."""
    for stem in STEMS if is_local(source) else ():
        source.tensors(f"{stem}.rank{rank}")


def placed(found: Found, sharded: Sharded) -> Found:
    """Where this rank's pieces are, as if they were parts of whole tensors in one file.

    Checkpoints of other kinds stay as they are.

    Raises:
        CheckpointError: another layout saved them, or they are in another host's folder.
    """
    source, here = found.source, layout_of(sharded)
    if not is_local(source):
        return found
    stored = source.json(LAYOUT)
    there = {key: stored.get(key) for key in here} if isinstance(stored, dict) else None
    if stored is None or there != here:
        raise CheckpointError(
            f"{source.folder} is of kind 'local': each rank's shards as they were, and only the "
            f"same layout can take them back. It was saved by {_described(there)}; this is "
            f"{_described(here)}{_first_difference(there, here)}. Load it as it was saved, and "
            "save it with kind='sharded' or kind='full', which load anywhere."
        )
    _check_here(source, sharded.comm.rank)
    _check_pieces(source, sharded)
    weights, states, own, gradients = (
        _places(source, stem, sharded.comm.rank, stored) for stem in STEMS
    )
    return replace(found, weights=weights, states=states, own=own, gradients=gradients)


def _check_here(source: Source, rank: int) -> None:
    """A folder that is local to a host holds the files of the ranks that ran there."""
    ranks = source.manifest.ranks if source.manifest else None
    if ranks is not None and rank not in ranks:
        raise CheckpointError(
            f"{source.folder} on {socket.gethostname()} holds the shards of ranks "
            f"{', '.join(map(str, ranks))}, and rank {rank} loads it: each host has only the files "
            "of the ranks that ran there. Start the ranks on the hosts that saved them, or copy "
            "each folder to the host where its ranks run now."
        )


def _check_pieces(source: Source, sharded: Sharded) -> None:
    """A later version may cut the same units in other places."""
    pieces = _pieces(source, "model", sharded.comm.rank)
    for home in homes(sharded.buckets):
        size, piece = home.value.numel(), pieces.get(home.member.name)
        there = (piece.start, piece.place.stored.shape) if piece else (home.start, (0,))
        if there != (home.start, (size,)):
            raise CheckpointError(
                f"{source.folder} holds {there[1]} elements of {home.member.name!r} from "
                f"{there[0]:,} on for rank {sharded.comm.rank}, which now has {size:,} from "
                f"{home.start:,} on. Load it with the shardwise that saved it, and save it with "
                "kind='sharded'."
            )


def _described(layout: Any) -> str:
    try:
        ranks, units, strategy = int(layout["world"]), len(layout["units"]), layout["strategy"]
        return (
            f"{ranks} rank{'s' * (ranks != 1)} with {strategy} and {units} unit{'s' * (units != 1)}"
        )
    except (KeyError, TypeError, ValueError):
        return "something that this shardwise does not know"


def _first_difference(there: Any, here: Mapping[str, Any]) -> str:
    """Of units, where all that is said in short is the same."""
    if _described(there) != _described(here):
        return ""
    for name, sizes in here["units"].items():
        if there["units"].get(name) != sizes:
            return f", of which {name!r} is another"
    return ""


class _Piece(NamedTuple):
    """A stored piece: of a whole of this shape, from this element on."""

    place: Place
    shape: tuple[int, ...]
    start: int

    @property
    def as_whole(self) -> Place:
        (file, stored), item = self.place, itemsize(self.place.stored.dtype)
        first = stored.start - self.start * item
        stop = first + prod(self.shape) * item
        return Place(file, Stored(stored.dtype, self.shape, first, stop))


def _places(source: Source, stem: str, rank: int, layout: Any) -> dict[str, Place]:
    """Every tensor of a stem: this rank's piece, or that there is one of which it holds nothing."""
    found: dict[str, Place] = {}
    try:
        for name, (dtype, shape) in layout[WHOLES].get(stem, {}).items():
            size = prod(map(int, shape)) * itemsize(dtype)
            found[name] = Place("", Stored(dtype, tuple(map(int, shape)), 0, size))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source.folder / LAYOUT} does not say which tensors there are ({error!r}). Load "
            "another checkpoint."
        ) from None
    return found | {name: one.as_whole for name, one in _pieces(source, stem, rank).items()}


def _pieces(source: Source, stem: str, rank: int) -> dict[str, _Piece]:
    """What one rank stored."""
    places = source.tensors(f"{stem}.rank{rank}")
    tables: dict[str, Any] = {}
    try:
        for file in {place.file for place in places.values()}:
            tables[file] = json.loads(source.header(file).metadata[PIECES])
        return {
            name: _Piece(place, tuple(map(int, tables[place.file][name][0])), int(start))
            for name, place in places.items()
            for start in [tables[place.file][name][1]]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source.folder}: the files {stem}.rank{rank} do not say of what they hold pieces "
            f"({error!r}). Load another checkpoint."
        ) from None
