"""A foreign checkpoint as one of ours: read tensor by tensor, written with checksums, renamed.

What is made is an ordinary folder: any number of ranks loads it, and ``transformers`` does.
"""

from __future__ import annotations

import json
import os
import platform
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint import checksum, state
from shardwise.checkpoint.contents import MODEL, OPTIMIZER
from shardwise.checkpoint.disk import explained, sync_folder, write_file
from shardwise.checkpoint.folder import Partial, check_replaceable, new_token, publish
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.manifest import FileRecord, Manifest, record_of
from shardwise.checkpoint.plan import Entry, FilePlan, Held, cut_at_blocks, index_of, plan_files
from shardwise.checkpoint.state import Training
from shardwise.checkpoint.writer import Chunk, Writer, allocate, pieces_of, write_header
from shardwise.convert.destination import clear
from shardwise.convert.foreign import Foreign, Tensor, opened
from shardwise.convert.normalize import (
    Sorted,
    class_of,
    named_numbers,
    records,
    sort_out,
)
from shardwise.errors import CheckpointError

__all__ = ["Converted", "import_checkpoint"]

LARGEST_FILE = 5_000_000_000  # bytes of tensors, as for saving
CONFIG = "config.json"

Given = str | Path | Sequence[str | Path]
Origin = tuple[Foreign, Tensor]


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        path: the folder.
        tensors: how many.
        nbytes: of the files that hold them.
        left_out: names in the source that have no place in the result.
    """

    path: Path
    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def import_checkpoint(
    source: Given, destination: str | Path, trust: bool = False, optimizer: str | None = None
) -> Converted:
    """Make a checkpoint of ours of what torch's DCP, or ``torch.save``, wrote.

    Pickles are opened in a process of their own, and by torch's restricted reader. A DCP folder
    describes itself by a pickle that has no such reader, so it always needs ``trust``. Two tensors
    at most are in memory.

    Args:
        source: a DCP folder, or a ``.pt`` file with a whole state dict; or several of them, where
            model and optimizer lie apart.
        destination: the new checkpoint's folder.
        trust: pickles may run what they like, in that process.
        optimizer: its class, where the source does not tell: ``"AdamW"``.

    Raises:
        CheckpointError: trust is needed; or the source is broken, or not understood. Nothing is
            left behind.
    """
    given = [source] if isinstance(source, (str, Path)) else list(source)
    paths = [Path(one).expanduser().absolute() for one in given]
    final = Path(destination).expanduser().absolute()
    check_replaceable(final)
    with ExitStack() as stack:
        found = sort_out([stack.enter_context(opened(path, trust)) for path in paths])
        groups, small = {MODEL: found.weights}, _small(paths)
        if found.groups or found.state:
            small[state.NAME] = _training(found, optimizer)
            groups[OPTIMIZER] = _states(found)
        plans = {stem: _planned(stem, some) for stem, some in groups.items()}
        for stem, some in plans.items():
            if len(some) > 1:
                text = json.dumps(index_of(some), indent=2)
                small[f"{stem}.safetensors.index.json"] = text.encode() + b"\n"
        files = [(plan, groups[stem]) for stem, some in plans.items() for plan in some]
        _write(final, files, small, found.step)
    every = [plan for plan, _ in files]
    tensors, nbytes = sum(len(plan.tensors) for plan in every), sum(plan.size for plan in every)
    return Converted(final, tensors, nbytes, tuple(found.left_out))


# --- decide ----------------------------------------------------------------------------------


def _states(found: Sorted) -> dict[str, Origin]:
    return {
        f"{key}/{name}": origin
        for key in sorted({key for one in found.state.values() for key in one})
        for name, one in found.state.items()
        if (origin := one.get(key)) is not None
    }


def _training(found: Sorted, optimizer: str | None) -> bytes:
    named_numbers(found)
    unknown = set(found.state) - {name for g in found.groups.values() for name in g.params}
    if unknown:
        raise CheckpointError(
            f"the optimizer has state of {len(unknown)} parameters that are in none of its groups, "
            f"the first is {min(unknown, key=str)!r}. Import the weights alone."
        )
    told = records(found, optimizer or class_of(found))
    values = state.values_of(Training())
    return state.document(found.step, values, told, [json.dumps(values["local"])])


def _small(paths: Sequence[Path]) -> dict[str, bytes]:
    """The folder's ``config.json``. What lies beside a lone file need not be of it."""
    for folder in filter(Path.is_dir, paths):
        text = _own_text(folder / CONFIG)
        try:
            if isinstance(json.loads(text), dict):
                return {CONFIG: text}
        except (ValueError, RecursionError):
            continue
    return {}


def _own_text(path: Path) -> bytes:
    """A small file's; nothing of a link, which could lead to anything that the user can read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(file, "rb") as opened_file:
        found = os.fstat(file)
        small = stat.S_ISREG(found.st_mode) and found.st_size < 1 << 24
        return opened_file.read(1 << 24) if small else b""


def _planned(stem: str, tensors: Mapping[str, Origin]) -> tuple[FilePlan, ...]:
    entries = [_entry(name, tensor) for name, (_, tensor) in tensors.items()]
    return plan_files(stem, entries, LARGEST_FILE, {"format": "pt"})


def _entry(name: str, tensor: Tensor) -> Entry:
    numel = prod(tensor.shape)
    held = (Held(0, numel, (0,)),) if numel else ()
    return Entry(name, tensor.dtype, tensor.shape, held)


# --- write -----------------------------------------------------------------------------------

Files = Sequence[tuple[FilePlan, Mapping[str, Origin]]]


def _write(final: Path, files: Files, small: Mapping[str, bytes], step: int | None) -> None:
    token = new_token()
    with explained(f"making a folder beside {final}"):
        clear(final)
        partial = Partial.make(final, token)
    try:
        with explained(f"writing {final.name}"):
            written = _written(partial.path, files, small)
            write_file(partial.path / MANIFEST, _manifest(token, step, written).encode())
            sync_folder(partial.path)
            publish(partial)
    except BaseException:
        if partial.path.exists():
            partial.abandon()
        raise


def _written(folder: Path, files: Files, small: Mapping[str, bytes]) -> dict[str, FileRecord]:
    plans = [plan for plan, _ in files]
    allocate(folder, plans, sum(map(len, small.values())) + (1 << 20))  # and the manifest
    total = sum(plan.size - len(plan.header) for plan in plans)
    with Writer(folder, 0, total) as writer:
        for plan, origins in files:
            for chunk in _chunks(plan, origins):
                writer.write(chunk)
        part = writer.finish()
    found = {}
    for plan in plans:
        pieces = [*write_header(folder, plan), *pieces_of([part], plan.name)]
        found[plan.name] = record_of(
            checksum.block_checksums(pieces, plan.size, plan.name), plan.size
        )
    for name, data in small.items():
        write_file(folder / name, data)
        found[name] = record_of(checksum.of_bytes(data), len(data))
    return found


def _chunks(plan: FilePlan, origins: Mapping[str, Origin]) -> Iterator[Chunk]:
    """A file's bytes, in order, tensor by tensor."""
    for name, stored in plan.tensors.items():
        if stored.start == stored.stop:
            continue
        source, tensor = origins[name]
        data = torch.from_numpy(source.read(tensor))
        for start, stop in cut_at_blocks(stored.start, stored.stop):
            some = data[start - stored.start : stop - stored.start]
            yield Chunk(plan.name, start, stop, (some,))


def _manifest(token: str, step: int | None, files: Mapping[str, FileRecord]) -> Manifest:
    from shardwise import __version__

    versions = {"shardwise": __version__, "torch": torch.__version__}
    return Manifest(
        token=token,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        step=step,
        world=1,
        strategy="imported",
        kind="full",
        versions={**versions, "python": platform.python_version()},
        aliases={},
        files=dict(files),
    )
