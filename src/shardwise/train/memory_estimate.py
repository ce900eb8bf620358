"""A lower bound of the memory of a run, checked before it starts so that it is not killed later.

It counts parameters, gradients and the optimizer's state, without activations, and counts once what
ranks of one machine may share; what is kept in host memory is checked there. A recipe that it
refuses can never work. Of a model that is read, quantised or with an adapter, the bytes are those
of the model on the meta device, to the last one; of our decoder, by a formula without padding.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.comm.grid import shape_of
from shardwise.comm.machine.environment import local_size
from shardwise.config.precision import dtype_name
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.bytes import Kept, kept
from shardwise.plan.draw import draw
from shardwise.plan.printed import size
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train import model_folder
from shardwise.train.optimizer import blocksize_of
from shardwise.train.records import Predicted

MIN_VOCABULARY = 257  # what every tokenizer has; a recipe's number may be more than its text gives
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MOMENTS = 2  # of AdamW, per parameter


class StateBytes(NamedTuple):
    """Bytes of the ranks in one memory: where the device computes, and in host memory beside it."""

    device: int
    host: int


def check_memory(
    recipe: Recipe, device: torch.device, ranks: int, vocabulary: int = MIN_VOCABULARY
) -> Predicted | None:
    """Raises ``ConfigError`` if the training state alone exceeds the device's memory.

    Args:
        device: of this rank; a CPU's memory is shared by all ranks of the machine, and so is the
            host memory beside other devices.
        ranks: world size.
        vocabulary: number of tokens, or a lower bound of it; of our decoder.

    Returns:
        What each rank will keep of a model that is read.
    """
    row = None if recipe.model.source is None else predict(recipe, ranks)

    def of(count: int) -> StateBytes:
        if row is None:
            return state_bytes(recipe, ranks, count, vocabulary)
        return _of_row(row, recipe, count)

    local_ranks = local_size(os.environ) or 1
    here = of(local_ranks)
    memories = {f"on this {device.type}": (local_ranks, sum(here), machine_memory())}
    if device.type != "cpu":
        memories = {f"on this {device.type}": (1, of(1).device, _memory(device))}
        memories["in host memory"] = (local_ranks, here.host, machine_memory())
    for where, (count, needed, available) in memories.items():
        if needed > available:
            raise ConfigError(
                f"{_described(recipe, vocabulary)}, {recipe.sharding.strategy} over {ranks:,} "
                f"ranks takes {size(needed)} for the {count:,} of them {where}, which has "
                f"{size(available)}. Choose a smaller model, more machines, "
                "sharding.strategy full_shard, or sharding.precision.stored_dtype bfloat16."
            )
    if row is None:
        return None
    return Predicted(row.stored, row.gradients, row.optimizer, row.in_host, row.gathered)


def predict(recipe: Recipe, ranks: int) -> Kept:
    """Predict what rank 0 will keep of the model in ``model.from``, whose weights are not read."""
    arguments = shard_arguments(recipe.sharding)
    blocksize = blocksize_of(recipe.optimizer.name)
    model = model_folder.on_meta(recipe)
    blueprint = draw(model, ranks=(0, ranks), blocksize=blocksize, **arguments)
    return kept(model, blueprint, recipe.optimizer.name.removeprefix("paged_"))


def _of_row(row: Kept, recipe: Recipe, local_ranks: int) -> StateBytes:
    placement, own = placement_of(recipe.sharding.strategy), row.parameters + row.padding
    parameters = local_ranks * own
    if placement.splits and not placement.frees:  # they stay gathered, maybe in shared memory
        parameters = max(parameters, own + row.gathered)
    rest = local_ranks * (row.between_steps - own)
    return StateBytes(parameters + rest, local_ranks * row.in_host)


def _described(recipe: Recipe, vocabulary: int) -> str:
    """The beginning of the error."""
    if recipe.model.source is not None:
        adapter = "" if recipe.adapter.rank is None else " with its adapter"
        return f"with gradients and optimizer state, the model in {recipe.model.source}{adapter}"
    numel, stored = recipe.model.parameters(vocabulary), dtype_name(_stored(recipe))
    return (
        f"the model has at least {numel:,} parameters: with gradients and AdamW's two moments in "
        f"{stored}"
    )


def _stored(recipe: Recipe) -> torch.dtype:
    """The dtype in which parameters are kept."""
    return recipe.sharding.precision.arguments()["stored_dtype"] or torch.float32


def state_bytes(recipe: Recipe, ranks: int, local_ranks: int, vocabulary: int) -> StateBytes:
    """A lower bound of the bytes of ``local_ranks`` of ``ranks`` ranks in one memory."""
    placement, offload = placement_of(recipe.sharding.strategy), recipe.sharding.offload
    stored = _stored(recipe).itemsize
    whole = recipe.model.parameters(vocabulary) * stored
    name, hybrid, mesh = placement.name, placement.hybrid, recipe.sharding.mesh
    shape = shape_of(name, hybrid, ranks, mesh, local_size(os.environ))
    split = (shape.shard if shape else ranks) if placement.splits else 1
    pieces = whole * local_ranks // (ranks if placement.splits_copies else split)
    moments = MOMENTS * pieces // (1 if recipe.optimizer.name == "adamw" else stored)
    # Parameters that stay gathered may be one copy in memory shared by the ranks of a machine.
    stays_whole = placement.splits and not placement.frees
    parameters = whole if stays_whole else whole * local_ranks // split
    if offload == "everything" and placement.frees:
        parameters = 0
    beside = pieces + moments
    if offload == "none":
        return StateBytes(parameters + beside, 0)
    return StateBytes(parameters, pieces + beside)


def machine_memory() -> int:
    """Bytes of RAM and swap of this machine, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = Path("/proc/meminfo")
    for line in swap.read_text("ascii").splitlines() if swap.exists() else []:
        if line.startswith("SwapTotal:"):
            total += int(line.split()[1]) * 1024
    existing = (Path(path) for path in LIMITS)
    limits = (path.read_text("ascii").strip() for path in existing if path.exists())
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def _memory(device: torch.device) -> int:
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
