"""One file with the whole model, which plain torch or safetensors reads: ``mnist_cnn.pt``.

Every rank gives its parts, rank 0 has the whole and writes it beside the name it will have; when
the bytes are on the disk it gets that name, at once. Ranks go on when it is there.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.collectives import check_same_on_all, raise_on_all, run_on_rank_0
from shardwise.checkpoint.disk import MODE, explained, make_folder, sync_folder
from shardwise.checkpoint.folder import new_token
from shardwise.checkpoint.state_dict import StateDict, model_state
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


def save_one_file(sharded: ShardedModel, path: str | Path, how: StateDict) -> SavedFile:
    """Write the whole model's state as one file. A collective; only rank 0 needs the disk."""
    comm, final = sharded.comm, Path(path).expanduser().absolute()
    raise_on_all(comm, "naming", lambda: _check_suffix(final))
    check_same_on_all(comm, {"single file": str(path)})
    states = model_state(sharded, how)
    tensors, nbytes = run_on_rank_0(comm, "writing", lambda: write_one_file(final, states))
    saved = SavedFile(final, tensors, nbytes)
    if comm.rank == 0:
        log.info("saved %s", saved)
    return saved


def _check_suffix(path: Path) -> None:
    if path.suffix not in (*PICKLED, ".safetensors"):
        raise CheckpointError(
            f"{path.name}: unknown file type. Use {', '.join(PICKLED)} (torch.load) or "
            ".safetensors."
        )


def write_one_file(path: Path, states: Mapping[str, Any]) -> tuple[int, int]:
    """Write ``states`` under ``path``: whole or not at all. Returns tensors and bytes."""
    unfinished = path.with_name(f".{path.name}.unfinished-{new_token()}")
    is_safetensors = path.suffix == ".safetensors"
    tensors = _once(states) if is_safetensors else dict(states)
    try:
        with explained(f"writing {path}"):
            make_folder(path.parent)
            try:
                (save_safetensors if is_safetensors else torch.save)(tensors, unfinished)
            except OSError:
                raise
            except Exception as error:  # how these libraries say that a disk is full
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
    return len(tensors), nbytes


def save_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the tensors as one file, which is not synced. May raise the library's own errors.

    The library makes files that nobody but their owner may read; this one's mode is as the umask
    says.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, MODE))
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def _once(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors under their first name alone: safetensors has no tensor of two names."""
    first_names: dict[int, str] = {}
    for name, value in states.items():
        first_names.setdefault(value.data_ptr() if value.numel() else id(value), name)
    return {name: states[name].contiguous() for name in first_names.values()}
