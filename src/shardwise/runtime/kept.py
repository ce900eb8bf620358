"""The dtypes of inputs: those of units are cast, and some modules stay in float32.

The parameters of these are gathered in float32 (see ``precision``). Their inputs are cast to
float32 and their outputs back, as FSDP1 does for ``MixedPrecision._module_classes_to_ignore``: so
the modules around them see one dtype.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.config.precision import Precision
from shardwise.runtime.pytrees import cast


def input_dtypes(
    model: nn.Module, modules: Collection[nn.Module], precision: Precision
) -> dict[nn.Module, torch.dtype]:
    """Return, for each of ``modules`` whose floating-point inputs are cast, the dtype."""
    named = ((module, precision.of_inputs(name)) for name, module in model.named_modules())
    return {module: dtype for module, dtype in named if dtype is not None and module in modules}


def cast_around_kept(model: nn.Module, precision: Precision) -> list[RemovableHandle]:
    """Hooks on the outermost modules of ``keep_in_fp32_modules``; ``remove()`` ends them."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), torch.float32)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return cast(output, precision.param_dtype or torch.float32)

    handles = list[RemovableHandle]()
    for name, module in model.named_modules() if precision.keep_in_fp32_modules else ():
        if precision.keeps(f"{name}.") and not precision.keeps(name):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
    return handles
