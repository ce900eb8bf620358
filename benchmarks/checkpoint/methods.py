"""Every method to save and to load as the same two calls, on the same state.

    ours, ours_async    Sharded.save, save_async and load, with sw.optim.AdamW
    dcp, dcp_async      torch.distributed.checkpoint.save, async_save and load of FSDP2's
                        get_state_dict, with the defaults: one writing thread, files synced
    full                FSDP2's full state dict in host memory of rank 0, torch.save, and back by
                        torch.load(mmap) and broadcast_from_rank0
    plain               pwrite of what ours saves, each rank to a file of its own, and fsync: what
                        the disk takes. It is no checkpoint, and nothing loads it

All are durable when they return: DCP syncs its files by default, ``torch.save`` does not, so
``full`` does it here. Ours computes a checksum of every byte while it saves and compares it while
it loads. DCP compares nothing; ``torch.save``'s archive has checksums that loading ignores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.checkpoint.trained import Size, TrainedModel, fsdp2, ours

Wait = Callable[[], object]
Save = Callable[[Path], Wait | None]
Load = Callable[[Path], object]


@dataclass(frozen=True)
class Method:
    """How one state is saved and loaded; both are collectives."""

    name: str  # of ``METHODS``
    trained: TrainedModel  # whose state
    # begin to save into a folder that is not there yet; what waits until it is durable, or
    # ``None`` where it is
    save: Save
    load: Load | None  # from there into a fresh trained


def is_async(method: str) -> bool:
    """Does it return before all is durable?"""
    return method.endswith("_async")


def method_of(name: str, trained: TrainedModel) -> Method:
    """The method of this name. A collective."""
    return Method(name, trained, *METHODS[name](trained))


def trained_model(name: str, size: Size) -> TrainedModel:
    """A trained that this method can save. A collective."""
    return ours(size) if engine_of(name) == "ours" else fsdp2(size)


def engine_of(name: str) -> str:
    """Whose state the method of this name saves."""
    return "ours" if name.startswith(("ours", "plain")) else "dcp"


def synchronous(name: str) -> str:
    """The method of the same engine that returns when all is durable."""
    return name.partition("_")[0]


def _ours(trained: TrainedModel, *, early: bool = False) -> tuple[Save, Load]:
    sharded = trained.sharded
    assert sharded is not None

    def save(folder: Path) -> Wait | None:
        what = (trained.optimizer, sw.Training(step=1))
        if not early:
            sharded.save(folder, *what)
            return None
        saving = sharded.save_async(folder, *what)
        return None if saving is None else saving.wait

    return save, lambda folder: sharded.load(folder, trained.optimizer, sw.Training())


def _state(trained: TrainedModel, *, whole: bool = False) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    how = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    model, optimizer = get_state_dict(trained.model, trained.optimizer, options=how)
    return {"model": model, "optimizer": optimizer}


def _dcp(trained: TrainedModel) -> tuple[Save, Load]:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    def save(folder: Path) -> None:
        dcp_save(_state(trained), checkpoint_id=folder)

    return save, partial(_dcp_load, trained)


def _dcp_async(trained: TrainedModel) -> tuple[Save, Load]:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    # Its thread uses collectives while the steps do: over one group they would wait for ever.
    own = dist.new_group(backend="gloo")

    def save(folder: Path) -> Wait:
        future: Any = async_save(_state(trained), checkpoint_id=folder, process_group=own)
        wait: Wait = future.result
        return wait

    return save, partial(_dcp_load, trained)


def _dcp_load(trained: TrainedModel, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(trained)  # a fresh optimizer takes an empty step, so that there are moments
    load(state, checkpoint_id=folder)
    model, optimizer = state["model"], state["optimizer"]
    both = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(trained.model, trained.optimizer, **both)


def _full(trained: TrainedModel) -> tuple[Save, Load]:
    def save(folder: Path) -> None:
        state = _state(trained, whole=True)
        if dist.get_rank() == 0:
            folder.mkdir()
            with (folder / "full.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    return save, partial(_full_load, trained)


def _full_load(trained: TrainedModel, folder: Path) -> None:
    from torch.distributed.checkpoint import state_dict as states

    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / "full.pt", mmap=True, weights_only=True)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not set_state_dict: on ranks without a state it leaves the model out, and all wait for ever.
    states.set_model_state_dict(trained.model, state["model"], options=options)
    states.set_optimizer_state_dict(
        trained.model, trained.optimizer, state["optimizer"], options=options
    )


def _plain(trained: TrainedModel) -> tuple[Save, None]:
    def save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with (folder / f"rank-{dist.get_rank()}").open("wb", buffering=0) as file:
            at = 0
            for _, _, _, value in trained.parts():
                left = value.contiguous().view(-1).view(torch.uint8).numpy().data
                while left:
                    done = os.pwrite(file.fileno(), left, at)
                    at, left = at + done, left[done:]
            os.fsync(file.fileno())
        dist.barrier()

    return save, None


METHODS: dict[str, Callable[[TrainedModel], tuple[Save, Load | None]]] = {
    "ours": _ours,
    "dcp": _dcp,
    "full": _full,
    "plain": _plain,
    "ours_async": partial(_ours, early=True),
    "dcp_async": _dcp_async,
}
