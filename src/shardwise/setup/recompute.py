"""Activation checkpointing of whole units, inside the hooks that gather them.

Where checkpointing is wrapped *around* a unit, the backward pass may gather it once for the
recomputation and once more for the gradients (huggingface/transformers#30404). Here a unit's own
forward is replaced by a checkpointed one, so the unit is entered once in the backward pass,
and both happen inside. Always the non-reentrant kind: it needs no input that requires a
gradient, so frozen embeddings and LoRA work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.units.units import Unit

__all__ = ["check_own_checkpointing", "checkpoint_units"]


def check_own_checkpointing(model: nn.Module) -> None:
    """Raises ``ConfigError`` where the model's own gradient checkpointing is on."""
    own = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if own:
        raise ConfigError(
            f"activation_checkpointing=True, and {type(own[0]).__name__} has its own gradient "
            "checkpointing on: everything would be recomputed twice, and gathered once more. "
            "Turn one off: model.activation_checkpointing_disable() (before transformers 6 also "
            "gradient_checkpointing_disable()), or leave activation_checkpointing out."
        )


def checkpoint_units(units: Sequence[Unit]) -> list[nn.Module]:
    """Recompute the activations of units of a class that occurs more than once.

    Returns the modules whose ``forward`` was replaced; ``del module.forward`` undoes it.
    """
    names = [unit.class_name for unit in units]
    chosen = [
        unit.modules[0]
        for unit in units
        if names.count(unit.class_name) > 1 and len(unit.modules) == 1
    ]
    for module in chosen:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return chosen
