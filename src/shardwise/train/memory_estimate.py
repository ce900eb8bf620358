"""A lower bound of the memory of a run, checked before it starts so that it is not killed later.

It counts parameters, gradients and the optimizer's state, without activations, and counts once what
ranks of one machine may share; what is kept in host memory is checked there. A recipe that it
refuses can never work. The bytes are those of the model on the meta device, to the last one.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from shardwise.comm.machine import accelerators
from shardwise.comm.machine.environment import local_size
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.launch.machine_memory import machine_memory
from shardwise.plan.bytes import Kept, kept
from shardwise.plan.draw import draw
from shardwise.plan.printed import size
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shard_arguments import shard_arguments
from shardwise.train.comparison import Predicted
from shardwise.train.optimizer import blocksize_of, state_of
from shardwise.train.question import model_of

MIN_VOCABULARY = 257  # what every tokenizer has; a recipe's number may be more than its text gives
MOMENTS = 2  # of AdamW, per parameter


class StateBytes(NamedTuple):
    """Bytes of the ranks in one memory: where the device computes, and in host memory beside it."""

    device: int
    host: int


def check_memory(
    recipe: Recipe, device: torch.device, ranks: int, vocabulary: int = MIN_VOCABULARY
) -> Predicted:
    """Predict what each rank will keep.

    Args:
        device: of this rank; a CPU's memory is shared by all ranks of the machine, and so is the
            host memory beside other devices.
        ranks: world size.
        vocabulary: number of tokens, or a lower bound of it; of our decoder.

    Raises:
        ConfigError: the training state alone exceeds the device's memory.
    """
    row = predict(recipe, ranks, vocabulary)
    local_ranks = local_size(os.environ) or 1
    here = state_bytes(row, recipe, local_ranks)
    memories = {f"on this {device.type}": (local_ranks, sum(here), machine_memory())}
    if device.type != "cpu":
        of_one = state_bytes(row, recipe, 1).device
        memories = {f"on this {device.type}": (1, of_one, memory_of(device))}
        memories["in host memory"] = (local_ranks, here.host, machine_memory(pinned=True))
    for where, (count, needed, available) in memories.items():
        if needed > available:
            raise ConfigError(
                f"with gradients and optimizer state, {_described(recipe)}, "
                f"{recipe.sharding.strategy} over {ranks:,} ranks takes {size(needed)} for the "
                f"{count:,} of them {where}, which has {size(available)}. Choose "
                f"{_less(recipe)}."
            )
    return Predicted(row.stored, row.gradients, row.optimizer, row.in_host, row.gathered)


def _less(recipe: Recipe) -> str:
    """Name what would take less than ``recipe`` does, by its keys."""
    sharding, choices = recipe.sharding, ["a smaller model", "more machines"]
    if placement_of(sharding.strategy).name != "full_shard":
        choices.append("sharding.strategy full_shard")
    if recipe.adapter.rank is None and sharding.precision.stored_dtype != "bfloat16":
        choices.append("sharding.precision.stored_dtype bfloat16")
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def predict(recipe: Recipe, ranks: int, vocabulary: int = MIN_VOCABULARY) -> Kept:
    """Predict what rank 0 will keep of the model, without its weights."""
    arguments = shard_arguments(recipe.sharding)
    blocksize = blocksize_of(recipe.optimizer.name)
    model = model_of(recipe, vocabulary)
    blueprint = draw(model, ranks=(0, ranks), blocksize=blocksize, **arguments)
    return kept(model, blueprint, state_of(recipe))


def state_bytes(row: Kept, recipe: Recipe, local_ranks: int) -> StateBytes:
    """A lower bound of the bytes of ``local_ranks`` ranks in one memory."""
    placement, own = placement_of(recipe.sharding.strategy), row.parameters + row.padding
    parameters = local_ranks * own
    if (
        not placement.frees
    ):  # they stay gathered, maybe in shared memory, of which shards are slices
        parameters = max(parameters, row.gathered + own * placement.resident)
    rest = local_ranks * (row.between_steps - own)
    return StateBytes(parameters + rest, local_ranks * row.in_host)


def _described(recipe: Recipe) -> str:
    model = recipe.model
    if model.source is None:
        return f"the model of {model.layers:,} layers of width {model.width:,}"
    adapter = "" if recipe.adapter.rank is None else " with its adapter"
    return f"the model in {model.source}{adapter}"


def memory_of(device: torch.device) -> int:
    """Bytes of the device; of a CPU those of the machine."""
    if device.type == "cpu":
        return machine_memory()
    module, keys = torch.get_device_module(device), accelerators.row(device).memory_stats
    if keys:
        return int(module.memory_stats(device)[keys[0]])
    return int(module.get_device_properties(device).total_memory)
