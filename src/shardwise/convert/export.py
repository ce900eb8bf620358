"""A checkpoint as another folder: merged or split, cast, checked on the way, in a few megabytes.

    1. decide     which tensors, in which dtypes, in which files: on paper, as for saving
    2. write      block by block: read and checked, cast, written with a new checksum
    3. publish    headers → small files → manifest → rename

The ordinary way loads the state of the whole model to write it again, so that what was trained
on many machines can be converted on none of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.dtypes import DTYPES, code_of, itemsize
from shardwise.checkpoint.folder import is_leftover, step_of
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.plan import BLOCK, Entry, FilePlan, plan_files
from shardwise.checkpoint.reader import Want, fill
from shardwise.checkpoint.source import Place, Source
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.checkpoint.writer import Chunk
from shardwise.convert.catalogue import OF_TORCH, stem_of
from shardwise.convert.companions import CONFIG, companions, with_dtype
from shardwise.convert.destination import Destination
from shardwise.convert.writer import Converted, Progress, entry_of, write_folder
from shardwise.errors import CheckpointError

__all__ = ["FLOATS", "ExportOptions", "check_whole", "export", "no_training", "no_weights"]

FLOATS = ("F64", "F32", "F16", "BF16")
"""What is cast. Eight-bit floats stay: without their scales they mean nothing."""


@dataclass(frozen=True)
class ExportOptions:
    """What the result is to be.

    Attributes:
        dtype: of floating-point weights; ``None``: as they are.
        max_file_size: bytes of tensors in a file at most, unless one tensor has more.
        with_optimizer: all that a run needs to go on, too, and not weights alone.
        overwrite: a checkpoint or an earlier export of that name may be replaced.
    """

    dtype: torch.dtype | None = None
    max_file_size: int = 5_000_000_000
    with_optimizer: bool = False
    overwrite: bool = False


def export(
    source: Source,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write ``source`` again, as a folder that ``transformers`` and shardwise load.

    Beyond Python and torch it holds a few blocks of 4 MiB, whatever the size of the model.

    Args:
        source: open; closed by the caller.
        destination: a folder that does not exist yet.
        progress: called with the bytes that were written since the last call, and all of them.

    Raises:
        CheckpointError: the source is damaged, has no such state, or a value does not fit the
            dtype; the disk is full; the destination is there. Nothing is left behind.
    """
    chosen = options or ExportOptions()
    named = Destination.of(destination, chosen.with_optimizer, chosen.overwrite)
    named.check_folder(None if source.manifest is None else source.folder)
    check_whole(source)
    stems = _stems(source, chosen.with_optimizer)
    places = {stem: source.tensors(stem) for stem in stems}
    if not places[MODEL]:
        raise no_weights(source)
    plans = _plans(places, chosen)
    small, left_out = companions(source, chosen.with_optimizer)
    if chosen.dtype is not None and CONFIG in small:
        small[CONFIG] = with_dtype(small[CONFIG], chosen.dtype)
    made = write_folder(
        named.path,
        plans,
        lambda stem, plan: _chunks(source, places[stem], plan),
        small,
        _facts(source.manifest, chosen.with_optimizer),
        progress,
    )
    dtypes = {name: stored.dtype for plan in plans[MODEL] for name, stored in plan.tensors.items()}
    cast = [name for name in dtypes if dtypes[name] != places[MODEL][name].stored.dtype]
    return replace(made, cast=tuple(cast), left_out=left_out)


# --- decide ----------------------------------------------------------------------------------


def _plans(
    places: Mapping[str, Mapping[str, Place]], options: ExportOptions
) -> dict[str, tuple[FilePlan, ...]]:
    """The new files of each stem; weights are cast, and no other state."""
    target = None if options.dtype is None else code_of(options.dtype, "--dtype")
    if target not in (None, *FLOATS):
        known = ", ".join(str(DTYPES[code]).removeprefix("torch.") for code in FLOATS)
        raise CheckpointError(f"weights cannot be cast to {options.dtype}; choose one of {known}.")
    plans = {}
    for stem, by_name in places.items():
        dtype = target if stem == MODEL else None
        entries = [_entry(name, place, dtype) for name, place in by_name.items()]
        plans[stem] = plan_files(stem, entries, options.max_file_size, {"format": "pt"})
    return plans


def _entry(name: str, place: Place, target: str | None) -> Entry:
    dtype, shape = place.stored.dtype, place.stored.shape
    if dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {name!r} is stored as {dtype}, and torch has no such dtype, so it cannot be "
            "exported. Convert it with the tool that wrote it."
        )
    return entry_of(name, target if target is not None and dtype in FLOATS else dtype, shape)


def _facts(manifest: Manifest | None, whole: bool) -> dict[str, object]:
    """Fields of the new manifest. With all its state a checkpoint keeps its own."""
    alone = {"world": 1, "strategy": "export", "kind": "full"}
    if manifest is None:
        return {**alone, "step": None, "aliases": {}}
    return dict(manifest) if whole else {**dict(manifest), **alone}


def check_whole(source: Source) -> None:
    """Raises ``CheckpointError`` for what holds no whole tensors, or was not written to its end."""
    if source.manifest is None:
        _check_foreign(source)


def _check_foreign(source: Source) -> None:
    """A folder without a manifest must not be one of ours that lost it, as for ``load``.

    One of its safetensors files can be exported by its own name.
    """
    name = source.folder.name
    ours = is_leftover(name) or step_of(name) is not None or source.has(TRAINING)
    if ours and type(source) is Source:
        raise CheckpointError(
            f"{source.folder} has no {MANIFEST}, and shardwise began it, so it was not written to "
            "its end or was damaged since. Export another checkpoint; or, for its weights as they "
            "are, one of its safetensors files."
        )


def no_training(source: Source) -> CheckpointError:
    """What is said of a source that has weights alone."""
    return CheckpointError(
        f"{source.folder} holds no optimizer and training state; it has weights alone. Export it "
        "without --with-optimizer."
    )


def no_weights(source: Source) -> CheckpointError:
    """What is said of a source that has none in safetensors."""
    of_torch = [name for name in source.listed() if name.endswith(OF_TORCH)]
    if of_torch:
        return CheckpointError(
            f"{source.folder} holds no model.safetensors, but {of_torch[0]}, which is of torch. "
            f"Name that file: {source.folder / of_torch[0]}."
        )
    return CheckpointError(
        f"{source.folder} holds no model.safetensors and no index of several, so there are no "
        "weights to export. Name a checkpoint, or a folder of safetensors files."
    )


def _stems(source: Source, all_of_it: bool) -> list[str]:
    if not all_of_it:
        return [MODEL]
    if source.manifest is None or not source.has(TRAINING):
        raise no_training(source)
    return list(dict.fromkeys([MODEL, *filter(None, map(stem_of, source.manifest.files))]))


# --- write -----------------------------------------------------------------------------------


def _chunks(source: Source, places: Mapping[str, Place], plan: FilePlan) -> Iterator[Chunk]:
    """The bytes of a new file, one block after the other, in the same memory each time."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    names = [name for name, stored in plan.tensors.items() if stored.stop > stored.start]
    ends = [plan.tensors[name].stop for name in names]
    for start, stop in plan.chunks(0):
        wants = []
        for name in names[bisect_right(ends, start) :]:
            stored = plan.tensors[name]
            lo, hi = max(start, stored.start), min(stop, stored.stop)
            if lo >= hi:
                break
            out = buffer[lo - start : hi - start].view(DTYPES[stored.dtype])
            first = (lo - stored.start) // itemsize(stored.dtype)
            wants.append((name, Want(places[name], first, out)))
        fill(source, [want for _, want in wants])
        _check_range(source, wants)
        yield Chunk(plan.name, start, stop, (buffer[: stop - start],))


def _check_range(source: Source, wants: Sequence[tuple[str, Want]]) -> None:
    """Raises ``CheckpointError`` where a cast made a finite value infinite."""
    for name, want in wants:
        if want.out.dtype == want.dtype or not bool(want.out.isinf().any()):
            continue
        before = torch.empty(want.out.numel(), dtype=want.dtype)
        fill(source, [Want(want.place, want.start, before)])
        lost: Tensor = want.out.isinf() & ~before.isinf()
        if count := int(lost.sum()):
            limit, largest = torch.finfo(want.out.dtype).max, float(before[lost].abs().max())
            raise CheckpointError(
                f"{count:,} values of {name} do not fit {want.out.dtype}: the largest there is "
                f"{largest:.6g}, and {limit:.6g} is the most, so they would become infinite. "
                "Nothing was written. Export as bfloat16, or without --dtype."
            )
