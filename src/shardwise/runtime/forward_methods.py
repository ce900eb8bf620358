"""Methods other than ``forward`` that gather units: ``model.encode(x)``, a VAE's ``loss``.

torch has no hooks for them, so registered methods are wrapped to gather their module's unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.runtime.forward import Hooks


class ForwardMethods:
    """The registered forward methods of a sharded model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapped: dict[tuple[nn.Module, str], None] = {}
        self._originals: list[tuple[nn.Module, str, Any]] = []  # replaced instance attributes

    def add(self, module: nn.Module, method: str) -> None:
        """Wrap it at the next ``install``; ``ConfigError`` if it is not there."""
        class_name = type(module).__name__
        if all(module is not part for part in self._model.modules()):
            raise ConfigError(
                f"register_forward_method() was given a {class_name} that is not in the sharded "
                "model. Pass the model or one of its modules."
            )
        if not callable(getattr(module, method, None)):
            names = [name for name in vars(type(module)) if not name.startswith("_")]
            suggestions = ", ".join(nearest(method, names)) or "none"
            raise ConfigError(
                f"{class_name} has no method {method!r}. The nearest of its own names: "
                f"{suggestions}."
            )
        self._wrapped[module, method] = None

    def install(self, hooks: Hooks) -> None:
        """Wrap the added methods so that they gather their module's unit."""
        for module, method in self._wrapped:
            self._originals.append((module, method, vars(module).get(method)))
            module.__dict__[method] = _gathering_method(hooks, module, getattr(module, method))

    def remove(self) -> None:
        for module, method, original in self._originals:
            del module.__dict__[method]
            if original is not None:
                module.__dict__[method] = original
        self._originals.clear()


def _gathering_method(
    hooks: Hooks, module: nn.Module, method: Callable[..., Any]
) -> Callable[..., Any]:
    unit = hooks.unit_of(module)

    @wraps(method)
    def gathering_method(*args: Any, **kwargs: Any) -> Any:
        return hooks.call(module, unit, method, args, kwargs)

    return gathering_method
