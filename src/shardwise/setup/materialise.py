"""A model's values on every rank: given, made, or sent by rank 0.

A model that was built on the meta device has shapes and no values. Making it whole on every
rank and then sharding it needs room for all of it; here it is made module by module in the
order of ``model.apply``, so random numbers are drawn as for the whole model, and each unit is
sharded and dropped as soon as its last module has its values.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Comm, Label
from shardwise.config.options import Init
from shardwise.errors import ConfigError
from shardwise.plan.units.units import Unit
from shardwise.torch_internals import buffers_of, tensors_of


def give_values(
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    init: Init,
    load_later: frozenset[Tensor],
    finished: Callable[[Unit], None],
) -> None:
    """Make each parameter real, one unit at a time; some of them may be so already.

    Args:
        init: called for each module that has meta parameters or buffers of its own, in the order
            of ``model.apply``. What it leaves without a value is a ``ConfigError``.
        load_later: what stays on the meta device, since its value is read later.
        finished: called for each unit when all its members have values; afterwards they may go.
    """
    # Asked before anything is made: a tied weight is initialised by each of its owners.
    empty = {m for m in model.modules() if any(_is_unmade(t, load_later) for _, t in tensors_of(m))}
    order = list(_in_apply_order(model))
    last = {id(module): place for place, (_, module) in enumerate(order)}  # one may come twice
    complete = defaultdict[int, list[Unit]](list)  # after which of them each unit is
    for unit in units:
        owners = (id(module) for member in unit.members for module, _ in member.owners)
        complete[max((last[owner] for owner in owners), default=0)].append(unit)
    for place, (name, module) in enumerate(order):
        if module in empty:
            made = _make(module, device, load_later)
            init(module)
            _check_made(name, module, made, init)
        for unit in complete[place]:
            finished(unit)


def _in_apply_order(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        yield from _in_apply_order(child, f"{prefix}{name}.")
    yield prefix.rstrip("."), model


def _is_unmade(tensor: Tensor, load_later: frozenset[Tensor]) -> bool:
    return tensor.is_meta and tensor not in load_later


def give_memory(param: Tensor, memory: Tensor) -> None:
    """Make it real. It is swapped, not replaced: optimizers and ties refer to the object."""
    torch.utils.swap_tensors(param, nn.Parameter(memory, requires_grad=param.requires_grad))


def _make(module: nn.Module, device: torch.device, load_later: frozenset[Tensor]) -> set[str]:
    """Give meta tensors memory, which is marked, and return their names."""
    unmade = {name: tensor for name, tensor in tensors_of(module) if _is_unmade(tensor, load_later)}
    for name, tensor in unmade.items():
        marked = _mark(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        if isinstance(tensor, nn.Parameter):
            give_memory(tensor, marked)
        else:
            buffers_of(module)[name] = marked
    return set(unmade)


def _mark(tensor: Tensor) -> Tensor:
    """Fill it with a value that few initialisations leave behind."""
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    counts = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.fill_(torch.iinfo(tensor.dtype).max if counts else torch.nan)


def _check_made(name: str, module: nn.Module, made: set[str], init: Init) -> None:
    """Raises ``ConfigError`` for elements that no initialisation has filled.

    A value may be equal to the mark: a mask of ones, a sentinel. So where marks are left, ``init``
    runs again over zeros: it leaves a mark that is a value, and a zero where it fills nothing.
    """
    suspects = [own for own, tensor in tensors_of(module) if own in made and _is_marked(tensor)]
    if not suspects:
        return
    values = {own: tensor.detach().clone() for own, tensor in tensors_of(module)}
    with _same_numbers(values[suspects[0]].device), torch.no_grad():
        for own, tensor in tensors_of(module):
            if own in made:
                tensor.zero_()
        init(module)
        for own, tensor in tensors_of(module):
            if own in suspects and (_marks(values[own]) & ~_marks(tensor)).any():
                raise _no_value(f"{name}.{own}".lstrip("."), type(module).__name__)
            tensor.copy_(values[own])


def _is_marked(tensor: Tensor) -> bool:
    if tensor.is_meta:  # an initialisation has put it there
        return False
    # In pieces: a whole one's answer has a byte for each element, which is half of a bf16 unit.
    return any(_marks(piece).any() for piece in tensor.detach().reshape(-1).split(1 << 20))


def _marks(tensor: Tensor) -> Tensor:
    """Return which elements are as ``_mark`` has filled them."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach().isnan()
    return tensor if tensor.dtype is torch.bool else tensor == torch.iinfo(tensor.dtype).max


def _same_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Restore the generators after the block, so that its random numbers are drawn again."""
    cards = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices=cards, device_type=device.type)


def _no_value(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{name!r} of {kind} was built on the meta device and still has no value after its "
        "initialisation, so training would start from garbage. Give "
        f"{kind} a reset_parameters() that fills it, or pass init=<function of a module> to "
        "shard(); for a transformers model init=model._init_weights."
    )


def sync(value: Tensor, comm: Comm, name: str) -> Tensor:
    """Rank 0's ``value`` on every rank, contiguous and on the comm's device. A collective."""
    # Moved first: what a model was built on may be no place that the comm's backend serves.
    moved = value.to(comm.device).resolve_conj().resolve_neg().contiguous()
    if moved.numel():
        comm.broadcast(moved, 0, Label("broadcast", name)).wait()
    return moved


def checksums(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """A checksum of each tensor's bytes, to find where ranks differ."""
    flat = ((name, t.detach().contiguous().cpu().reshape(-1)) for name, t in tensors)
    data = ((name, values.view(torch.uint8).numpy().tobytes()) for name, values in flat)
    return {f"values of {name}": f"{zlib.crc32(content):08x}" for name, content in data}
