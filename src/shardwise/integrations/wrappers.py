"""Other engines of data parallelism: none may be around a sharded model, nor inside one.

DDP's first broadcast would overwrite every rank's shards with rank 0's, and at the end of backward
it writes its own gradients over ours: zeros, even on one rank. FSDP would cut shards of shards.
Each of them asks torch for something before it touches a parameter: a wrapper registers
the module that it wraps, and ``fully_shard`` looks into the module's registry of composable APIs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY

from shardwise.errors import ConfigError

__all__ = ["check_unwrapped", "mark", "refuse_wrapper", "unmark"]

_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "deepspeed.runtime.engine.DeepSpeedEngine",
}
"""Known by name, so that none has to be imported."""
_COMPOSABLE = ("fully_shard", "replicate")


def check_unwrapped(model: nn.Module) -> None:
    """Raises ``ConfigError`` where another engine has taken over a part of ``model``."""
    for name, module in model.named_modules():
        applied = _wrapper(module) or _applied(module)
        if applied:
            raise ConfigError(
                f"{f'module {name!r}' if name else 'the model'} is managed by {applied} already, "
                "so its gradients would be averaged twice, or its parameters be cut twice. Pass "
                f"shard() the plain model instead of giving it to {applied}: "
                'strategy="full_shard" is what FSDP does, "no_shard" what DDP does.'
            )
    for name, param in model.named_parameters():
        if _is_dtensor(param):
            raise ConfigError(
                f"parameter {name!r} is a DTensor, of which each rank holds a part already "
                "(tensor parallelism, or fully_shard). shard() lays out plain tensors: pass it the "
                "model before it is parallelised."
            )


def refuse_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Raises ``ConfigError`` where ``wrapper`` is another engine's, around a sharded ``module``."""
    if applied := _wrapper(wrapper):
        raise ConfigError(
            f"{applied} was put around a {type(module).__name__} that is sharded: it would "
            "overwrite every rank's shards with rank 0's, and averaged gradients with its own. "
            "Train the model as it is. accelerate's prepare() and transformers' Trainer wrap every "
            "model that a launcher starts: prepare the data alone and write the loop, or leave "
            "shard() out."
        )


def mark(modules: Iterable[nn.Module]) -> None:
    """Let ``fully_shard`` refuse these, and FSDP1 leave them alone."""
    for module in modules:
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))


def unmark(modules: Iterable[nn.Module]) -> None:
    """What was registered by others stays."""
    for module in modules:
        if registry := module.__dict__.pop(REGISTRY_KEY, None):
            module.__dict__[REGISTRY_KEY] = OrderedDict(registry)


class _Registry(dict[str, Any]):
    """The composable APIs of one module, in which torch looks before it applies another."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ConfigError(
                "fully_shard() was called on a module of a sharded model, so shards would be cut "
                "again. Use one of the two: leave fully_shard() out, or call sharded.unshard() "
                "before it."
            )
        return name == "replicate" or super().__contains__(name)


def _wrapper(module: nn.Module) -> str:
    """The name of the engine whose wrapper this is; ``""`` if it is none."""
    kinds = type(module).__mro__
    return next((k.__name__ for k in kinds if f"{k.__module__}.{k.__name__}" in _WRAPPERS), "")


def _applied(module: nn.Module) -> str:
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((f"{name}()" for name in _COMPOSABLE if dict.__contains__(registry, name)), "")


def _is_dtensor(param: Tensor) -> bool:
    kinds = type(param).__mro__
    return any(k.__name__ == "DTensor" and k.__module__.startswith("torch.") for k in kinds)
