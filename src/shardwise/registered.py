"""What is registered in a sharded model, and whether that is still what was sharded.

A head that is put in after ``shard()`` lies in no unit: each rank would train one of its own, and
checkpoints would hold the old one. torch tells whenever a module or parameter is registered, so the
names are compared only then, and a step asks for no more than a flag.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import ConfigError
from shardwise.integrations.wrappers import mark, refuse_wrapper, unmark
from shardwise.torch_internals import children_of

__all__ = ["Registered"]

LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
"""Where modules are inserted and deleted without a word from torch."""


class Registered:
    """The parameters of a sharded model, by all their names.

    Args:
        model: the sharded model.
        params: name → parameter, as they were sharded.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._model, self._params = model, params
        self._lists = [module for module in model.modules() if isinstance(module, LISTS)]
        self._lengths = self._lengths_now()
        self._changed = False

    def install(self) -> None:
        """Listen to what is registered in the model's modules."""
        _listen()
        self._modules = list(self._model.modules())
        _watched.update(dict.fromkeys(self._modules, weakref.ref(self)))
        mark(self._modules)

    def remove(self) -> None:
        """Listen no more."""
        for module in self._modules:
            _watched.pop(module, None)
        unmark(self._modules)

    def note(self) -> None:
        """Something was registered in a module of the model."""
        self._changed = True

    def check(self) -> None:
        """``compare``, if anything was registered since it last found no difference."""
        if self._changed or self._lengths_now() != self._lengths:
            self.compare()

    def compare(self) -> None:
        """Raises ``ConfigError`` where the model has other parameters than were sharded."""
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for name, param in now.items():
            if self._params.get(name) is not param:
                raise _changed(name, "replaced" if name in self._params else "added")
        if gone := [name for name in self._params if name not in now]:
            raise _changed(gone[0], "removed")
        self._changed, self._lengths = False, self._lengths_now()

    def _lengths_now(self) -> list[int]:
        return [len(children_of(module)) for module in self._lists]


def _changed(name: str, how: str) -> ConfigError:
    follows = {
        "added": "it lies in no unit, so each rank would train one of its own",
        "replaced": "each rank would train one of its own, and checkpoints hold the old one",
        "removed": "checkpoints go on holding it, and its memory stays in use",
    }
    return ConfigError(
        f"parameter {name!r} was {how} after shard(): {follows[how]}. Change a model before "
        "shard(); or call sharded.relayout() now, which shards the model anew as it is, with rank "
        "0's values, and give an optimizer the new parameters."
    )


_watched: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Registered]] = (
    weakref.WeakKeyDictionary()
)


@cache
def _listen() -> None:
    """Once in a process: torch's hooks are global, and called for the modules of every model."""
    register_module_module_registration_hook(_registers)
    register_module_parameter_registration_hook(_registers)


def _registers(module: nn.Module, _: str, value: nn.Module | nn.Parameter | None) -> None:
    """Called before ``value`` becomes an attribute of ``module``, for every module there is."""
    if (watch := _watched.get(module)) is not None and (registered := watch()) is not None:
        registered.note()
    elif isinstance(value, nn.Module) and value in _watched:
        refuse_wrapper(module, value)
