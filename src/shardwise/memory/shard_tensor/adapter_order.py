"""The order of changes to a model that gets adapters of ``peft``; each wrong one is named.

Quantising and ``prepare_model_for_kbit_training`` freeze what is there, peft replaces modules, and
``shard()`` and an optimizer keep what they are given, so each sees only what came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, OptimizerError
from shardwise.memory.sharding import sharding_of

ORDER = (
    "The order is: quantise the model, prepare_model_for_kbit_training, get_peft_model, shard(), "
    "and then the optimizer."
)


def has_adapter(names: Iterable[str]) -> bool:
    """Is one of these parameters in a layer of peft: of an adapter, or of the base inside it?"""
    parts = {part for name in names for part in name.split(".")}
    return "base_layer" in parts or any(part.startswith("lora_") for part in parts)


def check_adapters(model: nn.Module) -> None:
    """Raises ``ConfigError`` if adapters that were made to be trained are all frozen."""
    configs: Any = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or any(p.requires_grad for p in model.parameters()):
        return
    if trained := [name for name, config in configs.items() if not config.inference_mode]:
        raise ConfigError(
            f"adapter {trained[0]!r} was made to be trained, and no parameter of the model is "
            "trainable: prepare_model_for_kbit_training(), or requires_grad_(False), froze the "
            f"adapter, too. {ORDER}"
        )


def check_optimizer(kind: str, params: Sequence[nn.Parameter]) -> None:
    """Raises ``OptimizerError`` if an optimizer holds the frozen base of adapters alone.

    Args:
        kind: its class's name.
        params: those of a sharded model that it holds.
    """
    names = [sharding.name for p in params if (sharding := sharding_of(p)) is not None]
    if has_adapter(names) and not any(p.requires_grad for p in params):
        raise OptimizerError(
            f"{kind} holds {len(params)} parameters of the model and none that is trained: it was "
            f"made before the adapters were added. {ORDER}"
        )
