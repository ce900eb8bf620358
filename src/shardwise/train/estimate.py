"""What a run needs at least, from its recipe: told before it starts, in place of a killed process.

A lower bound, so that what it refuses can never work: parameters, gradients and the optimizer's two
moments, without activations, without padding, and with what ranks of one machine may share counted
once.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwise.errors import ConfigError
from shardwise.strategies import Placement
from shardwise.train.config import Recipe

__all__ = ["check_memory", "machine_memory", "state_bytes"]

LEAST_VOCABULARY = (
    257  # what every tokenizer has; a recipe's number may be more than its text gives
)
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
STATES = 3  # beside each parameter: its gradient and two moments


def check_memory(
    recipe: Recipe, device: torch.device, ranks: int, vocabulary: int = LEAST_VOCABULARY
) -> None:
    """Raises ``ConfigError`` if the training state alone is more than the memory it would lie in.

    Args:
        device: of this rank. An accelerator is its own; a CPU's memory is that of all ranks here.
        ranks: of the whole run.
        vocabulary: tokens, as far as they are known.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    needed, there = state_bytes(recipe, ranks, here, vocabulary), _memory(device)
    if needed <= there:
        return
    count = recipe.model.parameters(vocabulary)
    stored = recipe.sharding.precision.stored or "float32"
    raise ConfigError(
        f"the model has at least {count:,} parameters: with gradients and AdamW's two moments in "
        f"{stored}, {recipe.sharding.strategy} over {ranks:,} ranks takes {needed / 1e9:,.1f} GB "
        f"for the {here:,} of them on this {device.type}, which has {there / 1e9:,.1f} GB. Choose "
        "a smaller model (model.width, model.layers), more machines, sharding.strategy full_shard, "
        "or sharding.precision.stored bfloat16."
    )


def state_bytes(recipe: Recipe, ranks: int, here: int, vocabulary: int) -> int:
    """Bytes of training state of ``here`` of ``ranks`` ranks in one memory, at least. Pure."""
    placement = Placement.named(recipe.sharding.strategy)
    stored = recipe.sharding.precision.dtypes()["stored"] or torch.float32
    whole = recipe.model.parameters(vocabulary) * stored.itemsize
    if not placement.splits:
        return here * (1 + STATES) * whole
    shards = whole * here // ranks
    # Where full parameters stay, ranks of one machine may map one copy.
    return STATES * shards + (shards if placement.frees else whole)


def machine_memory() -> int:
    """Bytes of RAM and swap that the processes of this machine, or of this container, may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    swap = Path("/proc/meminfo")
    for line in swap.read_text("ascii").splitlines() if swap.exists() else []:
        if line.startswith("SwapTotal:"):
            total += int(line.split()[1]) * 1024
    found = (Path(path) for path in LIMITS)
    limits = (path.read_text("ascii").strip() for path in found if path.exists())
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def _memory(device: torch.device) -> int:
    if device.type == "cpu":
        return machine_memory()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
