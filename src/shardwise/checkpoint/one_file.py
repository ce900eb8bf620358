"""One file with the whole model, which plain torch or safetensors reads: ``mnist_cnn.pt``.

.safetensors        every rank writes its own bytes, as of a checkpoint; where the disk is rank 0's
                    alone, it writes those of the others as they come, a few megabytes at a time
.pt, .pth, .bin     rank 0 has the whole model and writes it

The file is written beside its name, and gets it when the bytes are on the disk. Then all go on.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.collectives import (
    agreed,
    all_gather_object,
    broadcast_object,
    run_on_rank_0,
)
from shardwise.checkpoint.disk import explained, make_folder, sync_folder
from shardwise.checkpoint.folder import new_token
from shardwise.checkpoint.local_shards import LocalShard, param_shards, weights
from shardwise.checkpoint.plan import block_size, plan_files
from shardwise.checkpoint.save_plan import MODEL, SavePlan
from shardwise.checkpoint.segments import Segments, exchange_edges
from shardwise.checkpoint.state_dict import StateDict, model_state
from shardwise.checkpoint.writer import Part, allocate, check_hosts, check_parts, write_header
from shardwise.errors import CheckpointError
from shardwise.optim.sharded_model import ShardedModel

log = logging.getLogger("shardwise")

PICKLED = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class SavedFile:
    """A file that is complete; as text ``mnist_cnn.pt (8 tensors, 4,800,893 bytes)``."""

    path: Path
    tensors: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path.name} ({self.tensors:,} tensors, {self.nbytes:,} bytes)"


Wanted = Callable[[str], bool] | None
"""Which tensors are saved, by name; ``None``: all."""


def save_one_file(sharded: ShardedModel, path: str | Path, wanted: Wanted = None) -> SavedFile:
    """Write the whole model's state as one file. A collective."""
    comm, final = sharded.comm, Path(path).expanduser().absolute()
    agreed(comm, "naming", lambda: _check_suffix(final), lambda _: {"single file": str(path)})
    write = _pickled if final.suffix in PICKLED else _by_ranges
    saved = SavedFile(final, *write(sharded, final, wanted))
    if comm.rank == 0:
        log.info("saved %s", saved)
    return saved


def _check_suffix(path: Path) -> None:
    if path.suffix not in (*PICKLED, ".safetensors"):
        raise CheckpointError(
            f"{path.name}: unknown file type. Use {', '.join(PICKLED)} (torch.load) or "
            ".safetensors."
        )


# --- .safetensors: the ranks' own bytes --------------------------------------------------------


def _by_ranges(sharded: ShardedModel, final: Path, wanted: Wanted) -> tuple[int, int]:
    """Write the file in a folder beside its name. Returns tensors and bytes. A collective."""
    comm = sharded.comm
    token = broadcast_object(comm, new_token(), "token of a file")
    folder = final.with_name(f".{final.name}.unfinished-{token}")
    try:
        run_on_rank_0(comm, "beginning", lambda: _begin(folder))
        shared = all(all_gather_object(comm, folder.is_dir(), "folders of a file"))
        plan = partial(_plan, sharded, wanted, not shared)
        contents, _ = agreed(comm, "contents", plan, SavePlan.facts)
        run_on_rank_0(comm, "making a file", lambda: _allocate(folder, contents))
        if shared:
            exchange_edges(comm, contents.segments)
        check_parts(parts := contents.write(comm, folder, not shared))
        run_on_rank_0(comm, "publishing", lambda: _publish(folder, final, contents, parts))
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return len(contents.files[0].tensors), contents.nbytes


def _plan(sharded: ShardedModel, wanted: Wanted, one_writer: bool) -> SavePlan:
    """One file; of the names of a tied tensor it has the first that is wanted."""
    shards, aliases = weights(param_shards(sharded), sharded.model)
    names = {shard.entry.name: [shard.entry.name] for shard in shards}
    for alias, name in aliases.items():
        names[name].append(alias)
    stored: dict[str, LocalShard] = {}
    for shard in shards:
        for name in [n for n in names[shard.entry.name] if wanted is None or wanted(n)][:1]:
            stored[name] = shard._replace(entry=shard.entry._replace(name=name))
    if not stored:
        raise CheckpointError(
            "names= chose none of the model's tensors, so no file was written. Names are those of "
            "model.named_parameters() and its persistent buffers."
        )
    entries = [shard.entry for shard in stored.values()]
    block = block_size(entries)
    files = plan_files(MODEL, entries, 1 << 62, one_writer, block)
    return SavePlan(files, tuple(Segments(file, stored) for file in files), {}, {}, block, {})


def _begin(folder: Path) -> None:
    with explained(f"making {folder}"):
        make_folder(folder)


def _allocate(folder: Path, contents: SavePlan) -> None:
    with explained(f"making a file in {folder}"):
        allocate(folder, contents.files, 0)


def _publish(folder: Path, final: Path, contents: SavePlan, parts: Sequence[Part]) -> None:
    """Give the file its header and its name."""
    written = contents.files[0]
    with explained(f"writing {final}"):
        check_hosts(folder, [written.name], parts)
        write_header(folder, written)
        (folder / written.name).replace(final)
        sync_folder(final.parent)


# --- .pt, .pth, .bin: pickled whole --------------------------------------------------------------


def _pickled(sharded: ShardedModel, final: Path, wanted: Wanted) -> tuple[int, int]:
    states = model_state(sharded, StateDict("full", rank0_only=True, names=wanted))
    return run_on_rank_0(sharded.comm, "writing", lambda: write_one_file(final, states))


def write_one_file(path: Path, states: Mapping[str, Any]) -> tuple[int, int]:
    """Pickle ``states`` under ``path``: whole or not at all. Returns tensors and bytes."""
    unfinished = path.with_name(f".{path.name}.unfinished-{new_token()}")
    try:
        with explained(f"writing {path}"):
            make_folder(path.parent)
            try:
                torch.save(dict(states), unfinished)
            except OSError:
                raise
            except Exception as error:  # how torch says that a disk is full
                raise CheckpointError(
                    f"writing {path} failed: {error}. Check whether the disk is full, or save "
                    "elsewhere. An earlier file of that name is unchanged."
                ) from error
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            nbytes = unfinished.stat().st_size
            unfinished.replace(path)
            sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(states), nbytes
