"""The compiler of the units of ``shard(compile=…)``, and the modules that it gets.

Each unit's ``forward`` is compiled inside the hooks that gather and free the unit, so a graph
holds no collective and needs no break. Compiling the whole model breaks its graph there anyway.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from shardwise.comm.machine.accelerators import ROWS, row
from shardwise.errors import ConfigError, nearest
from shardwise.plan.units.units import Units
from shardwise.torch_internals import is_compiled

log = logging.getLogger("shardwise")


def backend_of(choice: bool | str, device: torch.device) -> str:
    """The backend for ``torch.compile``: the one that is named, or that of the device's row.

    Where inductor would need a C++ compiler that is missing, the fallback is ``aot_eager``. Where
    the named one is another accelerator's, it is that of this device.

    Raises:
        ConfigError: this torch has no such backend, or the one that is named cannot work here.
    """
    own = row(device).compile_backend
    name = own if choice is True else str(choice)
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known and name != own and name in {other.compile_backend for other in ROWS}:
        sentence = "the compiler %s is another device's: units are compiled by %s, %s's own"
        log.warning(sentence, name, own, device.type)
        name, choice = own, True
    if name not in known:
        usual = nearest(name, torch.compiler.list_backends(), limit=5)
        raise ConfigError(
            f"compile={choice!r}: this torch has no backend {name!r}. Nearest first: "
            f"{', '.join(usual)}. Name one, or import the plug-in that registers it."
        )
    compiler = os.environ.get("CXX", "g++")
    if name != "inductor" or device.type != "cpu" or shutil.which(compiler):
        return name
    missing = f"inductor needs a C++ compiler on CPU, and {compiler!r} is not on the PATH"
    if choice is not True:
        raise ConfigError(f'{missing}. Install one, set CXX, or pass compile="aot_eager".')
    log.warning("%s: units are compiled by aot_eager, which makes graphs and no kernels", missing)
    return "aot_eager"


def check_not_compiled(model: nn.Module) -> None:
    """Raises ``ConfigError`` where a part of ``model`` was compiled before."""
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        raise ConfigError(
            f"compile= was given, and {repr(compiled[0]) if compiled[0] else 'the model'} was "
            "compiled already: only one of the two backends would be used. Leave compile= out, or "
            "the call of torch.compile."
        )


def compiled_modules(model: nn.Module, units: Units) -> list[nn.Module]:
    """The modules of all units; of the root only if it is the one unit there is."""
    return [m for unit in units for m in unit.modules if m is not model or len(units) == 1]


def compile_forward(module: nn.Module, backend: str) -> Callable[..., Any]:
    """The compiled ``forward`` of ``module``. Modules of one class share their graphs."""
    forward = module.forward

    def forward_of_unit(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    forward_of_unit.__code__ = _own_code(type(module).__name__, forward_of_unit.__code__)
    compiled: Callable[..., Any] = torch.compile(forward_of_unit, backend=backend)
    return compiled


@cache
def _own_code(class_name: str, code: CodeType) -> CodeType:
    """``code`` for one class: torch.compile keeps graphs by code object, and only 8 for each.

    All of torch's own modules would share one, as would all that are recomputed.
    """
    return code.replace(co_name=f"forward of {class_name}")
