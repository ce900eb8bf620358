"""DDP, FSDP and other engines of gradients: refused around or inside a sharded model.

DDP's first broadcast would overwrite every rank's shards with rank 0's, and its gradients would
overwrite ours after backward. FSDP would shard shards. They are detected before they change a
parameter: a wrapper registers the wrapped module, and ``fully_shard`` reads the module's registry
of composable APIs. Beside a sharded model, in the same process, they train their own parameters.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY

from shardwise.errors import ConfigError

_AVERAGING = (
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "deepspeed.runtime.engine.DeepSpeedEngine",
)
_WRAPPERS = {*_AVERAGING, "torch.nn.parallel.data_parallel.DataParallel"}  # which has one process
"""By name, so that none has to be imported."""
_PER_SAMPLE = "opacus.grad_sample.gsm_base.AbstractGradSampleModule"
_COMPOSABLE = ("fully_shard", "replicate")


def check_unwrapped(model: nn.Module) -> None:
    """Raises ``ConfigError`` if another engine manages a part of ``model``."""
    for name, module in model.named_modules():
        _refuse_per_sample(module)
        applied = _wrapper(module) or _applied(module)
        if applied:
            raise ConfigError(
                f"{f'module {name!r}' if name else 'the model'} is managed by {applied} already, "
                "so its gradients would be averaged twice, or its parameters sharded twice. Pass "
                f"the plain model to shard(), without {applied}: "
                'strategy="full_shard" corresponds to FSDP, "no_shard" to DDP.'
            )
    for name, param in model.named_parameters():
        if _is_dtensor(param):
            raise ConfigError(
                f"parameter {name!r} is a DTensor, which is sharded already (tensor parallelism, "
                "or fully_shard). shard() supports plain tensors: call it before the model is "
                "parallelised."
            )


def refuse_wrapper(wrapper: nn.Module, module: nn.Module) -> None:
    """Raises ``ConfigError`` if ``wrapper`` is another engine's, around a sharded ``module``."""
    _refuse_per_sample(wrapper)
    if applied := _wrapper(wrapper):
        raise ConfigError(
            f"{applied} was put around a {type(module).__name__} that is sharded: it would "
            "overwrite every rank's shards with rank 0's, and averaged gradients with its own. "
            "Train the model without it. accelerate's prepare() and transformers' Trainer wrap "
            "every model under a launcher: leave shard() out, and import Accelerator or Trainer "
            "from shardwise.integrations.accelerate or shardwise.integrations.transformers."
        )


def _refuse_per_sample(module: nn.Module) -> None:
    """Raises ``ConfigError`` for opacus's wrapper, whose optimizer makes gradients of its own."""
    if _PER_SAMPLE in _names(module):
        raise ConfigError(
            f"{type(module).__name__} of opacus keeps the gradient of each sample of this rank, "
            "and its optimizer puts their clipped sum in the place of the mean over the ranks, so "
            "copies of the model would differ. Train with opacus without shard(), over several "
            "ranks with its DifferentiallyPrivateDistributedDataParallel."
        )


def trained_by_others(params: Iterable[nn.Parameter]) -> set[int]:
    """Return the ids of parameters whose gradients another engine averages over the ranks.

    torch keeps no list of its wrappers, so the garbage collector is asked what refers to their
    classes. A list of all objects would hold tuples that other threads are about to make, which
    then end in a ``SystemError``.
    """
    ids = {id(param) for param in params if _is_dtensor(param)}
    imported = [(sys.modules.get(path.rpartition(".")[0]), path) for path in _AVERAGING]
    wrappers = [getattr(module, path.rpartition(".")[2], None) for module, path in imported]
    kinds = {kind for wrapper in wrappers if wrapper for kind in _with_subclasses(wrapper)}
    for module in gc.get_referrers(*kinds):
        if type(module) in kinds:
            ignored = vars(module).get("parameters_to_ignore", ())  # DDP's, by names inside it
            named = module.named_parameters()
            ids |= {id(p) for name, p in named if name.removeprefix("module.") not in ignored}
    return ids


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for other in kind.__subclasses__():
        yield from _with_subclasses(other)


def mark(modules: Iterable[nn.Module]) -> None:
    """Mark modules as sharded, so that ``fully_shard`` raises and FSDP1 skips them."""
    for module in modules:
        module.__dict__[REGISTRY_KEY] = _Registry(module.__dict__.get(REGISTRY_KEY, {}))


def unmark(modules: Iterable[nn.Module]) -> None:
    """Undo ``mark``; entries of other APIs stay."""
    for module in modules:
        if registry := module.__dict__.pop(REGISTRY_KEY, None):
            module.__dict__[REGISTRY_KEY] = OrderedDict(registry)


class _Registry(dict[str, Any]):
    """The registry of composable APIs of one module, which torch reads before it adds one."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ConfigError(
                "fully_shard() was called on a module of a sharded model, so shards would be "
                "sharded again. Leave fully_shard() out, or call sharded.unshard() before it."
            )
        return name == "replicate" or super().__contains__(name)


def _wrapper(module: nn.Module) -> str:
    """The name of the engine whose wrapper this is, or ``""``."""
    return next((path.rpartition(".")[2] for path in _names(module) if path in _WRAPPERS), "")


def _names(module: nn.Module) -> list[str]:
    """Its class and those that it inherits from, with their modules."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]


def _applied(module: nn.Module) -> str:
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((f"{name}()" for name in _COMPOSABLE if dict.__contains__(registry, name)), "")


def _is_dtensor(param: Tensor) -> bool:
    kinds = type(param).__mro__
    return any(k.__name__ == "DTensor" and k.__module__.startswith("torch.") for k in kinds)
