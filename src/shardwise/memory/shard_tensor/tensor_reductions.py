"""Reductions of a sharded parameter to one number.

Each rank reduces its own part, which may be empty; one small all-gather collects these numbers,
and each rank combines them in rank order. So the result is the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.mesh import gather_rows
from shardwise.comm.protocol import Comm, Label
from shardwise.memory.shard_tensor.function_call import Call
from shardwise.memory.sharding import Sharding
from shardwise.torch_internals import foreach_norm

CHUNK = 1 << 16
"""Elements. On CPU torch adds millions of squares one by one, with an error of up to 1e-3."""


@dataclass(frozen=True)
class TensorReduction:
    """A reduction of all elements: one of each rank's part, and one of their results."""

    part: Callable[[Tensor], Tensor]  # of any shape, possibly empty → 0-dim
    combine: Callable[[Tensor], Tensor]  # the ranks' results, [W] → 0-dim
    dtype: torch.dtype  # of the result


def over_ranks(
    parts: Tensor, combine: Callable[[Tensor], Tensor], axes: tuple[Comm, ...], label: Label
) -> Tensor:
    """Combine each of ``parts`` (``[k]``) with the other ranks': ``[k]``. A collective."""
    sent = parts.to(axes[0].device, torch.uint8 if parts.dtype is torch.bool else parts.dtype)
    columns = gather_rows(sent, axes, label).to(parts.device, parts.dtype).unbind(1)
    return torch.stack([combine(column) for column in columns])


@dataclass(frozen=True)
class ReductionArgs:
    """The arguments of a reduction."""

    part: Tensor  # this rank's
    numel: int  # of the full tensor
    options: dict[str, Any]  # the other arguments, by name
    dtype: torch.dtype | None  # the requested dtype of the result


def reduce(call: Call) -> Any:
    """The global number on every rank, or a ``ShardUseError``. A collective."""
    shard = call.first
    if len(list(call.tensors())) > 1:
        return call.unsupported()
    sharding: Sharding = shard.sharding
    if (reduction := _reduction_of(call, shard)) is None:
        return call.unsupported()
    if call.records():
        return call.recording_error()
    name = call.name.removeprefix("linalg_")
    local = reduction.part(shard).reshape(1)
    label = Label(name, sharding.name)
    return over_ranks(local, reduction.combine, sharding.axes, label)[0].to(reduction.dtype)


def _reduction_of(call: Call, shard: Any) -> TensorReduction | None:
    """``None`` if the function does not reduce all elements to one number."""
    names, args = _POSITIONAL.get(call.name, ()), call.args[1:]
    named = {k: v for k, v in call.kwargs.items() if v is not None and v is not False and v != ()}
    dtype = named.pop("dtype", None)
    options = dict(zip(names, args, strict=False)) | named
    if call.name not in _REDUCTIONS or len(args) > len(names) or not options.keys() <= {*names}:
        return None
    numel = shard.sharding.shape.numel()
    return _REDUCTIONS[call.name](ReductionArgs(shard, numel, options, dtype))


def norms_of_list(call: Call) -> Any:
    """The norm of each tensor of a list: one collective for all shards of the same ranks."""
    if call.records():
        return call.recording_error()
    tensors = list(call.args[0])
    order = float(call.kwargs.get("ord", (*call.args[1:], 2.0)[0]))
    norms = [vector_norm(tensor, order) for tensor in tensors]
    groups: dict[tuple[Comm, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if call.is_shard(tensor):
            groups.setdefault(tensor.sharding.axes, []).append(index)
    for axes, indices in groups.items():
        local = torch.stack([norms[index].double() for index in indices])
        label = Label("norm", f"of {len(indices)} shards")
        norms_over_ranks = over_ranks(local, partial(joined_norm, order), axes, label)
        for index, norm in zip(indices, norms_over_ranks.unbind(), strict=True):
            norms[index] = norm
    dtype = call.kwargs.get("dtype")
    pairs = zip(norms, tensors, strict=True)
    return [norm.to((dtype or tensor.dtype).to_real()) for norm, tensor in pairs]


def vector_norm(part: Tensor, order: float) -> Tensor:
    """The p-norm of a tensor of any shape, in a wide dtype; 0-dim."""
    flat = part.reshape(-1).to(_wide(part.dtype))
    if not flat.numel():
        of_nothing = inf if order < 0 else 0.0
        return torch.full((), of_nothing, dtype=flat.dtype.to_real(), device=flat.device)
    chunks = flat.split(CHUNK) if flat.device.type == "cpu" else (flat,)
    return joined_norm(order, torch.stack(foreach_norm(chunks, order)))


def joined_norm(order: float, norms: Tensor) -> Tensor:
    """The norm of a vector from the norms of its pieces."""
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)


def _norm(args: ReductionArgs) -> TensorReduction | None:
    order = args.options.get("p", args.options.get("ord", "fro"))
    order = 2.0 if order == "fro" else order
    dtype = args.part.dtype
    if isinstance(order, str) or not (dtype.is_floating_point or dtype.is_complex):
        return None
    part, combine = partial(vector_norm, order=float(order)), partial(joined_norm, float(order))
    return TensorReduction(part, combine, (args.dtype or dtype).to_real())


def _linalg_norm(args: ReductionArgs) -> TensorReduction | None:
    """The norm of all elements; a matrix norm (two dimensions and an order) is not supported."""
    of_matrix = args.part.ndim > 1 and args.options.get("ord", "fro") != "fro"
    return None if of_matrix else _norm(args)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this dtype are summed."""
    if dtype.is_complex or dtype is torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _sum(args: ReductionArgs) -> TensorReduction:
    dtype = args.part.dtype
    wide = _wide(args.dtype or dtype)
    result_dtype = dtype if dtype.is_floating_point or dtype.is_complex else wide
    return TensorReduction(partial(torch.sum, dtype=wide), torch.sum, args.dtype or result_dtype)


def _mean(args: ReductionArgs) -> TensorReduction | None:
    dtype = args.dtype or args.part.dtype
    if not (dtype.is_floating_point or dtype.is_complex):  # torch refuses it, too
        return None
    return replace(_sum(args), combine=lambda sums: sums.sum() / args.numel)


def _extreme(choose: Callable[[Tensor], Tensor], args: ReductionArgs) -> TensorReduction:
    """``amax`` or ``amin``; a part without elements is the number that is never chosen."""
    smallest, largest = _range(args.part.dtype)
    of_nothing = smallest if choose is torch.amax else largest

    def local_reduce(part: Tensor) -> Tensor:
        return choose(part) if part.numel() else part.new_full((), of_nothing)

    return TensorReduction(local_reduce, choose, args.part.dtype)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number of this dtype."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        return -inf, inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


_POSITIONAL = {"norm": ("p",), "linalg_vector_norm": ("ord",), "linalg_norm": ("ord",)}
"""The positional arguments after the tensor."""
_REDUCTIONS: dict[str, Callable[[ReductionArgs], TensorReduction | None]] = {
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "linalg_norm": _linalg_norm,
    "sum": _sum,
    "mean": _mean,
    "max": partial(_extreme, torch.amax),
    "amax": partial(_extreme, torch.amax),
    "min": partial(_extreme, torch.amin),
    "amin": partial(_extreme, torch.amin),
    "any": lambda _: TensorReduction(torch.any, torch.any, torch.bool),
    "all": lambda _: TensorReduction(torch.all, torch.all, torch.bool),
    "count_nonzero": lambda _: TensorReduction(torch.count_nonzero, torch.sum, torch.int64),
}
