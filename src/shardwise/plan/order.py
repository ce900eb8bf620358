"""The order in which units run: guessed, rehearsed on the meta device, then recorded.

A prefetch needs to know what comes next, and asking the user for it (as lists of modules to
prefetch) goes stale with the first refactoring. So there is one order per mode, which starts
as a guess from the order in which modules were registered, can be replaced by a rehearsal
without memory or compute, and is corrected by what a real step did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.precision import Precision
from shardwise.errors import ScheduleError
from shardwise.plan.schedule.events import Cue, Op, Order, Phase
from shardwise.plan.units.units import Units
from shardwise.torch_internals import parameters_of, tensors_of, tree_map_only

UnitNames = Mapping[nn.Module, str]  # the unit that a module's forward uses


def guess(model: nn.Module, unit_names: UnitNames) -> Order:
    """The order of registration: right for most models, harmless where it is wrong."""
    forward = tuple(_walk(model, unit_names))
    return Order(forward, mirror(forward))


def _walk(module: nn.Module, unit_names: UnitNames) -> Iterator[Cue]:
    unit = unit_names.get(module)
    if unit is not None:
        yield Cue(Op.ENTER, unit, Phase.FORWARD)
    for child in module.children():
        yield from _walk(child, unit_names)
    if unit is not None:
        yield Cue(Op.EXIT, unit, Phase.FORWARD)


def mirror(forward: Sequence[Cue]) -> tuple[Cue, ...]:
    """The backward pass enters the units in reverse order: first the one that was left last."""
    flip = {Op.ENTER: Op.EXIT, Op.EXIT: Op.ENTER}
    return tuple(Cue(flip[cue.op], cue.unit, Phase.BACKWARD) for cue in reversed(forward))


def rehearse(
    model: nn.Module, units: Units, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Order:
    """Run ``model`` on the meta device and note which of its ``units`` it enters.

    Nothing is allocated and nothing is sent: parameters, buffers and inputs are replaced by meta
    tensors for the length of the call. Of ``args`` and ``kwargs`` only shapes and dtypes matter.

    Raises:
        ScheduleError: the model looks at values (``.item()``, data-dependent branches), which the
            meta device does not have.
    """
    cues: list[Cue] = []
    handles = [hook for item in units.unit_names.items() for hook in _listen(*item, cues)]
    called = tree_map_only(Tensor, lambda t: t.to("meta"), (tuple(args), dict(kwargs)))
    try:
        with torch.no_grad():
            # torch ties weights by all names, and would leave a module of two names on meta.
            torch.func.functional_call(model, on_meta(model, units), *called, tie_weights=False)
    except (NotImplementedError, RuntimeError) as error:
        raise ScheduleError(
            f"the rehearsal on the meta device stopped: {error}. The model depends on values, "
            "which meta tensors do not have. Leave rehearse() out: the first step records it."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Order(tuple(cues), mirror(cues))


def on_meta(
    model: nn.Module, units: Units, precision: Precision = Precision()
) -> dict[str, Tensor]:
    """An empty tensor for each parameter and buffer, by one name of its module; ties are kept.

    Of parameters that are sharded, the whole shape; as they are computed with.
    """
    members = [member for unit in units for member in unit.members]
    shapes: dict[Tensor, torch.Size] = {member.param: member.shape for member in members}
    dtypes: dict[Tensor, torch.dtype] = {}
    for member in members:
        param, kept = member.param, precision.keeps(member.name)
        dtypes[param] = precision.of(param.dtype, param.requires_grad, kept).param
    empty: dict[Tensor, Tensor] = {}
    state = {}
    for prefix, module in model.named_modules():
        for name, tensor in tensors_of(module):
            shape, dtype = shapes.get(tensor, tensor.shape), dtypes.get(tensor, tensor.dtype)
            made = torch.empty(shape, dtype=dtype, device="meta")
            made.requires_grad_(tensor.requires_grad)
            if name in parameters_of(module):  # or a module that registers it anew loses it
                made = nn.Parameter(made, made.requires_grad)
            state[f"{prefix}.{name}".lstrip(".")] = empty.setdefault(tensor, made)
    return state


def _listen(module: nn.Module, unit: str, cues: list[Cue]) -> list[Any]:
    def enter(*_: object) -> None:
        cues.append(Cue(Op.ENTER, unit, Phase.FORWARD))

    def leave(*_: object) -> None:
        cues.append(Cue(Op.EXIT, unit, Phase.FORWARD))

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
