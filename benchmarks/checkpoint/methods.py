"""Every method to save and to load as the same three calls, on the same state.

    ours, ours_async    Sharded.save, save_async and load, with sw.optim.AdamW
    ours_step_async     save_async(copied_by="next_step")
    dcp, dcp_async      torch.distributed.checkpoint.save, async_save and load of FSDP2's
                        get_state_dict, with the defaults: one writing thread, files synced
    full                FSDP2's full state dict in host memory of rank 0, torch.save, and back by
                        torch.load(mmap) and broadcast_from_rank0

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
from benchmarks.checkpoint.state import Size
from benchmarks.checkpoint.trained import TrainedModel, fsdp2, ours

Wait = Callable[[], object]


@dataclass(frozen=True)
class Method:
    """How one state is saved and loaded; all three are collectives."""

    name: str  # of ``METHODS``
    trained: TrainedModel  # whose state
    # begin to save into a folder that is not there yet; what waits until it is durable
    save: Callable[[Path], Wait]
    load: Callable[[Path], object]  # from there into a fresh trained
    is_async: bool  # does ``save`` return before it is durable?


def method_of(name: str, trained: TrainedModel) -> Method:
    """The method of this name. A collective."""
    made = METHODS[name]
    return Method(name, trained, *made(trained), is_async=name.endswith("_async"))


def trained_model(name: str, size: Size) -> TrainedModel:
    """A trained that this method can save. A collective."""
    return ours(size) if name.startswith("ours") else fsdp2(size)


def synchronous(name: str) -> str:
    """The method of the same engine that returns when all is durable."""
    return name.partition("_")[0]


# ---- ours ----------------------------------------------------------------------------------

Calls = tuple[Callable[[Path], Wait], Callable[[Path], object]]


def _ours(trained: TrainedModel) -> Calls:
    def save(folder: Path) -> Wait:
        _sharded(trained).save(folder, trained.optimizer, sw.Training(step=1))
        return _nothing

    return save, _loads(trained)


def _ours_async(trained: TrainedModel, copied_by: str = "return") -> Calls:
    sharded = _sharded(trained)

    def save(folder: Path) -> Wait:
        what = (trained.optimizer, sw.Training(step=1))
        saving = sharded.save_async(folder, *what, copied_by=copied_by)
        assert saving is not None  # when_busy is "wait"
        return saving.wait

    return save, _loads(trained)


def _loads(trained: TrainedModel) -> Callable[[Path], object]:
    return lambda folder: _sharded(trained).load(folder, trained.optimizer, sw.Training())


def _sharded(trained: TrainedModel) -> sw.Sharded:
    assert trained.sharded is not None
    return trained.sharded


def _nothing() -> None:
    """It was durable already."""


# ---- torch ---------------------------------------------------------------------------------


def _state(trained: TrainedModel) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    return {"model": model, "optimizer": optimizer}


def _dcp(trained: TrainedModel) -> Calls:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    def save(folder: Path) -> Wait:
        dcp_save(_state(trained), checkpoint_id=folder)
        return _nothing

    return save, lambda folder: _dcp_load(trained, folder)


def _dcp_async(trained: TrainedModel) -> Calls:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    # Its thread uses collectives while the steps do: over one group they would wait for ever.
    own = dist.new_group(backend="gloo")

    def save(folder: Path) -> Wait:
        future: Any = async_save(_state(trained), checkpoint_id=folder, process_group=own)
        wait: Wait = future.result
        return wait

    return save, lambda folder: _dcp_load(trained, folder)


def _dcp_load(trained: TrainedModel, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(trained)  # a fresh optimizer takes an empty step, so that there are moments
    load(state, checkpoint_id=folder)
    set_state_dict(
        trained.model,
        trained.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _full(trained: TrainedModel) -> Calls:
    def save(folder: Path) -> Wait:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(trained.model, trained.optimizer, options=options)
        if dist.get_rank() == 0:
            folder.mkdir()
            with (folder / "full.pt").open("wb") as file:
                torch.save({"model": model, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return _nothing

    return save, lambda folder: _full_load(trained, folder)


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


METHODS: dict[str, Callable[[TrainedModel], Calls]] = {
    "ours": _ours,
    "dcp": _dcp,
    "full": _full,
    "ours_async": _ours_async,
    "ours_step_async": partial(_ours_async, copied_by="next_step"),
    "dcp_async": _dcp_async,
}
