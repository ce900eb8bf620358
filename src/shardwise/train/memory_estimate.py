"""A lower bound of the memory of a run, checked before it starts so that it is not killed later.

It counts parameters, gradients and the optimizer's two moments, without activations and padding,
and counts once what ranks of one machine may share; what is kept in host memory is checked there.
A recipe that it refuses can never work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.comm.environment import local_size
from shardwise.comm.mesh import shape_of
from shardwise.errors import ConfigError
from shardwise.precision import dtype_name
from shardwise.strategies import placement_of
from shardwise.train import model_folder
from shardwise.train.config import Recipe

__all__ = ["StateBytes", "check_memory", "machine_memory", "state_bytes"]

MIN_VOCABULARY = 257  # what every tokenizer has; a recipe's number may be more than its text gives
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MOMENTS = 2  # of AdamW, per parameter


class StateBytes(NamedTuple):
    """Of the ranks in one memory: where the device computes, and in host memory beside it."""

    device: int
    host: int


def check_memory(
    recipe: Recipe, device: torch.device, ranks: int, vocabulary: int = MIN_VOCABULARY
) -> None:
    """Raises ``ConfigError`` if the training state alone exceeds the device's memory.

    Args:
        device: of this rank; a CPU's memory is shared by all ranks of the machine, and so is the
            host memory beside other devices.
        ranks: world size.
        vocabulary: number of tokens, or a lower bound of it.
    """
    local_ranks = local_size(os.environ) or 1
    here = state_bytes(recipe, ranks, local_ranks, vocabulary)
    memories = {f"on this {device.type}": (local_ranks, sum(here), machine_memory())}
    if device.type != "cpu":
        own, memory = state_bytes(recipe, ranks, 1, vocabulary).device, _memory(device)
        memories = {f"on this {device.type}": (1, own, memory)}
        memories["in host memory"] = (local_ranks, here.host, machine_memory())
    for where, (count, needed, available) in memories.items():
        if needed > available:
            numel = parameter_count(recipe, vocabulary)
            stored = dtype_name(_stored(recipe))
            raise ConfigError(
                f"the model has at least {numel:,} parameters: with gradients and AdamW's two "
                f"moments in {stored}, {recipe.sharding.strategy} over {ranks:,} ranks takes "
                f"{needed / 1e9:,.1f} GB for the {count:,} of them {where}, which has "
                f"{available / 1e9:,.1f} GB. Choose a smaller model (model.width, model.layers), "
                "more machines, sharding.strategy full_shard, or sharding.precision.stored "
                "bfloat16."
            )


def parameter_count(recipe: Recipe, vocabulary: int) -> int:
    """Of the model; of ``model.from``, as many as are stored, whatever the vocabulary."""
    if recipe.model.source is not None:
        return model_folder.numel(recipe)
    return recipe.model.parameters(vocabulary)


def _stored(recipe: Recipe) -> torch.dtype:
    """The dtype in which parameters are kept."""
    own = torch.float32 if recipe.model.source is None else model_folder.dtype_of(recipe)
    stored: torch.dtype | None = recipe.sharding.precision.arguments()["stored"]
    return stored or own


def state_bytes(recipe: Recipe, ranks: int, local_ranks: int, vocabulary: int) -> StateBytes:
    """A lower bound of the bytes of ``local_ranks`` of ``ranks`` ranks in one memory."""
    placement, offload = placement_of(recipe.sharding.strategy), recipe.sharding.offload
    stored = _stored(recipe).itemsize
    whole = parameter_count(recipe, vocabulary) * stored
    if (bits := recipe.model.quantization.bits) is not None:  # of all weights, at least
        whole = whole * bits // (8 * stored)
    shape = shape_of(placement, ranks, recipe.sharding.mesh, local_size(os.environ))
    split = (shape.shard if shape else ranks) if placement.splits else 1
    pieces = whole * local_ranks // (ranks if placement.splits_copies else split)
    if recipe.adapter.rank is not None:  # whose gradients and moments are few
        pieces = 0
    moments = MOMENTS * pieces // (1 if recipe.optimizer.name == "adamw" else stored)
    # Parameters that stay gathered may be one copy in memory shared by the ranks of a machine.
    stays_whole = placement.splits and not placement.frees
    parameters = whole if stays_whole else whole * local_ranks // split
    if "parameters" in offload and placement.frees:
        parameters = 0
    in_host = pieces * ("gradients" in offload) + (pieces + moments) * ("optimizer" in offload)
    on_device = pieces * ("gradients" not in offload)
    on_device += moments * ("optimizer" not in offload)
    return StateBytes(parameters + on_device, in_host)


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
