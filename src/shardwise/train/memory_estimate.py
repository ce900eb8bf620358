"""A lower bound of the memory of a run, checked before it starts so that it is not killed later.

It counts parameters, gradients and the optimizer's two moments, without activations and padding,
and counts once what ranks of one machine may share. A recipe that it refuses can never work.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwise.comm.environment import local_size
from shardwise.comm.mesh import shape_of
from shardwise.errors import ConfigError
from shardwise.strategies import placement_of
from shardwise.train.config import Recipe

__all__ = ["check_memory", "machine_memory", "state_bytes"]

MIN_VOCABULARY = 257  # what every tokenizer has; a recipe's number may be more than its text gives
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
STATES = 3  # per parameter: its gradient and two moments


def check_memory(
    recipe: Recipe, device: torch.device, ranks: int, vocabulary: int = MIN_VOCABULARY
) -> None:
    """Raises ``ConfigError`` if the training state alone exceeds the device's memory.

    Args:
        device: of this rank; a CPU's memory is shared by all ranks of the machine.
        ranks: world size.
        vocabulary: number of tokens, or a lower bound of it.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    needed, available = state_bytes(recipe, ranks, local_ranks, vocabulary), _memory(device)
    if needed <= available:
        return
    count = recipe.model.parameters(vocabulary)
    stored = recipe.sharding.precision.stored or "float32"
    raise ConfigError(
        f"the model has at least {count:,} parameters: with gradients and AdamW's two moments in "
        f"{stored}, {recipe.sharding.strategy} over {ranks:,} ranks takes {needed / 1e9:,.1f} GB "
        f"for the {local_ranks:,} of them on this {device.type}, which has "
        f"{available / 1e9:,.1f} GB. Choose a smaller model (model.width, model.layers), more "
        "machines, sharding.strategy full_shard, or sharding.precision.stored bfloat16."
    )


def state_bytes(recipe: Recipe, ranks: int, local_ranks: int, vocabulary: int) -> int:
    """A lower bound of the bytes of ``local_ranks`` of ``ranks`` ranks in one memory."""
    placement = placement_of(recipe.sharding.strategy)
    stored = recipe.sharding.precision.arguments()["stored"] or torch.float32
    whole = recipe.model.parameters(vocabulary) * stored.itemsize
    if not placement.splits:
        return local_ranks * (1 + STATES) * whole
    shape = shape_of(placement, ranks, recipe.sharding.mesh, local_size(os.environ))
    split = shape.shard if shape else ranks
    shards = whole * local_ranks // split
    states = STATES * whole * local_ranks // (ranks if placement.splits_copies else split)
    # Parameters that stay gathered may be one copy in memory shared by the ranks of a machine.
    return states + (shards if placement.frees else whole)


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
    if device.type == "cpu":
        return machine_memory()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
