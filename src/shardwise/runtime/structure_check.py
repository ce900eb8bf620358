"""Detects what is changed after ``shard()`` and is not trained: parameters, and copies of them.

A head that is added after ``shard()`` is in no unit: each rank would train its own, and checkpoints
would keep the old one. torch's global registration hooks set a flag, so the names are compared
only after a registration. Values of ``state_dict()`` are copies here: writes are counted and told.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import ConfigError, ShardUseError
from shardwise.memory.shard_tensor.adapter_order import ORDER, has_adapter
from shardwise.runtime.other_engines import mark, refuse_wrapper, unmark
from shardwise.torch_internals import children_of, get_version

log = logging.getLogger("shardwise")
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
"""Containers whose insertions and deletions call no registration hook."""


class StructureCheck:
    """Compares a model's parameters with those that it had when it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._params = model, dict(model.named_parameters(remove_duplicate=False))
        self._containers = [module for module in model.modules() if isinstance(module, CONTAINERS)]
        self._lengths = self._lengths_now()
        self.changed = False  # was a module or parameter registered in the model?
        # Its version counts writes into values of state dicts; ``writes`` were told or loaded.
        with torch.inference_mode(False):
            self.copies, self.writes = torch.empty(0, device="cpu"), 0

    def install(self) -> None:
        _install_hooks()
        self._modules = list(self.model.modules())
        _watched.update(dict.fromkeys(self._modules, ref(self)))
        mark(self._modules)

    def remove(self) -> None:
        for module in self._modules:
            _watched.pop(module, None)
        unmark(self._modules)

    def check(self) -> None:
        """``compare``, if anything was registered since it last succeeded; tell of lost writes."""
        if (writes := get_version(self.copies)) != self.writes:
            self.writes = writes
            log.warning(
                "a value of state_dict() was written in place. Of a sharded model it is a copy, so "
                "this changes the model only if it is passed to load_state_dict(). Or write to the "
                "parameters: `for p in model.parameters(): p.mul_(0.9)`, under torch.no_grad()."
            )
        if self.changed or self._lengths_now() != self._lengths:
            self.compare()

    def compare(self) -> None:
        """Raises ``ConfigError`` if the model has other parameters than were sharded."""
        current = dict(self.model.named_parameters(remove_duplicate=False))
        for name, param in current.items():
            if self._params.get(name) is not param:
                raise _change_error(name, "replaced" if name in self._params else "added")
        if removed := [name for name in self._params if name not in current]:
            raise _change_error(removed[0], "removed")
        self.changed, self._lengths = False, self._lengths_now()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardUseError(
            f"a module of the sharded {type(self.model).__name__} cannot be pickled, or copied "
            "without the whole model: it belongs to this rank's group. Save model.state_dict() "
            "(full tensors) or sharded.local_state_dict() (shards); copy.deepcopy(model) of the "
            "whole model gives a plain copy."
        )

    def _lengths_now(self) -> list[int]:
        return [len(children_of(module)) for module in self._containers]


def _change_error(name: str, change: str) -> ConfigError:
    if has_adapter([name]):
        return ConfigError(
            f"parameter {name!r} is new: adapters were added after shard(), so they are in no unit "
            f"and each rank would train its own. {ORDER}"
        )
    consequences = {
        "added": "it is in no unit, so each rank would train its own",
        "replaced": "each rank would train its own, and checkpoints contain the old one",
        "removed": "checkpoints still contain it, and its memory stays in use",
    }
    return ConfigError(
        f"parameter {name!r} was {change} after shard(): {consequences[change]}. Change a model "
        "before shard(); or call sharded.relayout() now, which shards the changed model with rank "
        "0's values, and pass the new parameters to an optimizer."
    )


_watched: WeakKeyDictionary[nn.Module, ref[StructureCheck]] = WeakKeyDictionary()


@cache
def _install_hooks() -> None:
    """Install torch's registration hooks, once per process: they run for every model."""
    register_module_module_registration_hook(_on_registration)
    register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, _: str, value: nn.Module | nn.Parameter | None) -> None:
    """Called before ``value`` is registered in ``module``, for all modules of the process."""
    if (reference := _watched.get(module)) is not None and (check := reference()) is not None:
        check.changed = True
    elif isinstance(value, nn.Module) and value in _watched:
        refuse_wrapper(module, value)
