"""One number over all elements of a parameter, of which each rank has a part.

Each rank reduces its own part, which may be empty; one small all-gather brings these numbers
together, and each rank combines them in rank order. So the result is the same bits on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise.calls import Call
from shardwise.comm.protocol import Comm, Label
from shardwise.refusals import clipped
from shardwise.sharding import Sharding
from shardwise.torch_internals import foreach_norm

__all__ = ["Reduction", "norms_of_list", "over_ranks", "reduced", "reduction_of"]

CHUNK = 1 << 16
"""Elements: on CPU, torch adds up millions of squares one by one, and is off by up to 1e-3."""


@dataclass(frozen=True)
class Reduction:
    """A function of all elements, made of one for each rank's part.

    Attributes:
        part: a tensor of any shape, also an empty one → 0-dim.
        combine: ``[W]``, what ``part`` gave on each rank → 0-dim.
        dtype: of the result.
    """

    part: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]
    dtype: torch.dtype


def over_ranks(
    parts: Tensor, combine: Callable[[Tensor], Tensor], comm: Comm, label: Label
) -> Tensor:
    """Combine each of ``parts`` (``[k]``, of any dtype) with the other ranks': ``[k]``.

    A collective.
    """
    sent = parts.to(comm.device, torch.uint8 if parts.dtype is torch.bool else parts.dtype)
    columns = comm.gather_rows(sent, label).to(parts.device, parts.dtype).unbind(1)
    return torch.stack([combine(column) for column in columns])


@dataclass(frozen=True)
class Asked:
    """What a reduction was asked for.

    Attributes:
        part: this rank's part.
        numel: elements of the whole.
        options: the arguments beside the tensor, by name.
    """

    part: Tensor
    numel: int
    options: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the result, where one was asked for."""
        return self.options.get("dtype")


def reduction_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], part: Tensor, numel: int
) -> Reduction | None:
    """What a function of this name computes; ``None`` if it is not over all elements.

    Args:
        name: of torch's function, such as ``"norm"``.
        args, kwargs: what it was given beside the tensor.
        part: this rank's part of the tensor.
        numel: elements of the whole.
    """
    positional = dict(zip(_FIRST.get(name, ()), args, strict=False))
    named = {key: value for key, value in kwargs.items() if not _says_nothing(value)}
    options = positional | named
    known = {*_FIRST.get(name, ()), "dtype"}
    if name not in _REDUCTIONS or len(positional) < len(args) or not known.issuperset(options):
        return None
    return _REDUCTIONS[name](Asked(part, numel, options))


def reduced(call: Call) -> Any:
    """One number for every rank. A collective. A ``ShardUseError`` where it cannot be formed."""
    shard = call.first
    if not (call.args and call.args[0] is shard) or len(list(call.tensors())) > 1:
        return call.misused()
    sharding: Sharding = shard.sharding
    numel = sharding.shape.numel()
    reduction = reduction_of(call.name, call.args[1:], call.kwargs, shard, numel)
    if reduction is None:
        return call.misused()
    if call.records():
        return call.recorded()
    name = call.name.removeprefix("linalg_")
    if name.endswith("norm") and _is_clipping():
        raise clipped()
    here = reduction.part(shard).reshape(1)
    label = Label(name, sharding.name)
    return over_ranks(here, reduction.combine, sharding.comm, label)[0].to(reduction.dtype)


def norms_of_list(call: Call) -> Any:
    """The norm of each of a list: one collective for all shards of the same ranks."""
    if call.records():
        return call.recorded()
    if _is_clipping():
        raise clipped()
    tensors = list(call.args[0])
    order = float(call.kwargs.get("ord", (*call.args[1:], 2.0)[0]))
    norms = [vector_norm(tensor, order) for tensor in tensors]
    groups: dict[int, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if call.is_shard(tensor):
            groups.setdefault(id(tensor.sharding.comm), []).append(at)
    for places in groups.values():
        here = torch.stack([norms[at].double() for at in places])
        comm, label = tensors[places[0]].sharding.comm, Label("norm", f"of {len(places)} shards")
        whole = over_ranks(here, partial(joined_norm, order), comm, label)
        for at, norm in zip(places, whole.unbind(), strict=True):
            norms[at] = norm
    dtype = call.kwargs.get("dtype")
    return [norm.to(dtype or t.dtype) for norm, t in zip(norms, tensors, strict=True)]


def _is_clipping() -> bool:
    """Does torch's clipping ask for this norm? It shows no function of its own to intercept."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.utils.clip_grad":
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        if frame.f_code.co_name == "clip_grad_norm_":
            return True
        frame = frame.f_back  # a comprehension has a frame of its own before Python 3.12
    return False


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == ()


def vector_norm(part: Tensor, order: float) -> Tensor:
    """The p-norm of a tensor of any shape, in a wide dtype; 0-dim."""
    flat = part.reshape(-1).to(_wide(part.dtype))
    if not flat.numel():
        return torch.full((), inf if order < 0 else 0.0, dtype=flat.dtype, device=flat.device)
    chunks = flat.split(CHUNK) if flat.device.type == "cpu" else (flat,)
    return joined_norm(order, torch.stack(foreach_norm(chunks, order)))


def joined_norm(order: float, norms: Tensor) -> Tensor:
    """The norm of a vector from the norms of its pieces."""
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)


def _norm(asked: Asked) -> Reduction | None:
    order = asked.options.get("p", asked.options.get("ord", "fro"))
    order = 2.0 if order == "fro" else order
    if isinstance(order, str) or not asked.part.is_floating_point():
        return None
    of_part = partial(vector_norm, order=float(order))
    return Reduction(of_part, partial(joined_norm, float(order)), asked.dtype or asked.part.dtype)


def _linalg_norm(asked: Asked) -> Reduction | None:
    """With an order, it is that of a matrix where there are two dimensions."""
    of_matrix = asked.part.ndim > 1 and asked.options.get("ord", "fro") != "fro"
    return None if of_matrix else _norm(asked)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this dtype are added up in."""
    if dtype.is_complex or dtype is torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _sum(asked: Asked) -> Reduction:
    stored = asked.part.dtype
    wide = _wide(asked.dtype or stored)
    narrow = stored if stored.is_floating_point or stored.is_complex else wide
    return Reduction(partial(torch.sum, dtype=wide), torch.sum, asked.dtype or narrow)


def _mean(asked: Asked) -> Reduction | None:
    if not (asked.dtype or asked.part.dtype).is_floating_point:  # torch refuses it, too
        return None
    return replace(_sum(asked), combine=lambda sums: sums.sum() / asked.numel)


def _largest(asked: Asked) -> Reduction:
    return _extreme(asked, torch.amax, _range(asked.part.dtype)[0])


def _smallest(asked: Asked) -> Reduction:
    return _extreme(asked, torch.amin, _range(asked.part.dtype)[1])


def _extreme(asked: Asked, choose: Callable[[Tensor], Tensor], of_nothing: float) -> Reduction:
    def of_part(part: Tensor) -> Tensor:
        return choose(part) if part.numel() else part.new_full((), of_nothing)

    return Reduction(of_part, choose, asked.part.dtype)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the greatest number of this dtype."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        return -inf, inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


_FIRST = {"norm": ("p",), "linalg_vector_norm": ("ord",), "linalg_norm": ("ord",)}
"""The arguments that may follow the tensor without a name."""
_REDUCTIONS: dict[str, Callable[[Asked], Reduction | None]] = {
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "linalg_norm": _linalg_norm,
    "sum": _sum,
    "mean": _mean,
    "max": _largest,
    "amax": _largest,
    "min": _smallest,
    "amin": _smallest,
    "any": lambda _: Reduction(torch.any, torch.any, torch.bool),
    "all": lambda _: Reduction(torch.all, torch.all, torch.bool),
    "count_nonzero": lambda _: Reduction(torch.count_nonzero, torch.sum, torch.int64),
}
