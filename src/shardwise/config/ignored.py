"""Parameters that ``shard()`` leaves alone: whole, plain, in no unit, with gradients of their own.

As ``ignored_modules`` and ``ignored_states`` of FSDP1 and ``ignored_params`` of ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from shardwise.errors import ConfigError, nearest

Ignored = Collection[nn.Module | nn.Parameter | str]
"""Modules and parameters of a model, or their full names; of a module all parameters."""


def ignored_params(model: nn.Module, ignored: Ignored) -> frozenset[nn.Parameter]:
    """The parameters that ``ignored`` stands for; ``ConfigError`` if one is not in the model."""
    if isinstance(ignored, (nn.Parameter, str)):  # each is a collection, too
        raise ConfigError(f"ignored= is a {type(ignored).__name__}. Pass a list of them.")
    if not ignored:
        return frozenset()
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    own_modules, own_params = set(modules.values()), set(params.values())
    chosen: set[nn.Parameter] = set()
    for given in ignored:
        part = modules.get(given, params.get(given)) if isinstance(given, str) else given
        if isinstance(part, nn.Module) and part in own_modules:
            chosen.update(part.parameters())
        elif isinstance(part, nn.Parameter) and part in own_params:
            chosen.add(part)
        else:
            raise _unknown(model, given, [*modules, *params])
    return frozenset(chosen)


def _unknown(model: nn.Module, given: object, names: Sequence[str]) -> ConfigError:
    what = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    near = f" Nearest are {', '.join(nearest(given, names))}." if isinstance(given, str) else ""
    return ConfigError(
        f"ignored= has {what}, which is no module, parameter or name of one in this "
        f"{type(model).__name__}. Pass a list of them, such as [model.experts].{near}"
    )
