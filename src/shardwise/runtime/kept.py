"""Modules that compute in float32 inside a model that computes in 16 bits.

Their parameters are gathered in float32 (see ``precision``). Their inputs are cast to float32 and
their outputs back, as FSDP1 does for ``MixedPrecision._module_classes_to_ignore``: so the modules
around them see one dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.precision import Precision
from shardwise.runtime.pytrees import cast

__all__ = ["cast_around_kept"]


def cast_around_kept(model: nn.Module, precision: Precision) -> list[RemovableHandle]:
    """Hooks on the outermost modules that ``precision.keep`` names; ``remove()`` ends them."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), torch.float32)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return cast(output, precision.compute or torch.float32)

    handles = list[RemovableHandle]()
    for name, module in model.named_modules() if precision.keep else ():
        if precision.keeps(f"{name}.") and not precision.keeps(name):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
    return handles
