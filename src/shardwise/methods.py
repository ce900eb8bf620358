"""Methods other than ``forward`` that gather units: ``model.encode(x)``, a VAE's ``loss``.

Units are gathered where a module's ``forward`` begins, which torch tells by hooks. Of other
methods it tells nothing, so those that are named here are wrapped, and enter their module's unit
as ``forward`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.hooks import Hooks

__all__ = ["ForwardMethods"]


class ForwardMethods:
    """The methods that enter units, as long as the handle lives.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: dict[tuple[nn.Module, str], None] = {}
        self._before: list[tuple[nn.Module, str, Any]] = []  # what modules held by these names

    def add(self, module: nn.Module, method: str) -> None:
        """Wrap it at the next ``install``.

        Raises:
            ConfigError: ``module`` is not in the model, or has no such method.
        """
        kind = type(module).__name__
        if all(module is not part for part in self._model.modules()):
            raise ConfigError(
                f"register_forward_method() was given a {kind} that is not in the sharded model. "
                "Pass the model, or a module that it holds."
            )
        if not callable(getattr(module, method, None)):
            own = [name for name in vars(type(module)) if not name.startswith("_")]
            near = ", ".join(nearest(method, own)) or "none"
            raise ConfigError(
                f"{kind} has no method {method!r}. The nearest of its own names: {near}."
            )
        self._named[module, method] = None

    def install(self, hooks: Hooks) -> None:
        """Let every method that was added enter its module's unit."""
        for module, method in self._named:
            self._before.append((module, method, vars(module).get(method)))
            module.__dict__[method] = _entering(hooks, module, getattr(module, method))

    def remove(self) -> None:
        """Let the modules have the methods that they had."""
        for module, method, before in self._before:
            del module.__dict__[method]
            if before is not None:
                module.__dict__[method] = before
        self._before.clear()


def _entering(hooks: Hooks, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    unit = hooks.unit_of(module)

    @wraps(method)
    def entering(*args: Any, **kwargs: Any) -> Any:
        return hooks.call(module, unit, method, args, kwargs)

    return entering
