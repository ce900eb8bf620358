"""Dispatch of torch's functions on shards: the result is a shard, a global number, or an error.

The rules are those of ``shard_tensor``. An error is returned, not raised: in a pass of the model
the caller may gather the arguments instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import RanksDisagree, ShardUseError
from shardwise.memory.gathered_parameter import GatheredParameter
from shardwise.memory.shard_tensor.elementwise import (
    COPIES,
    COUNTS,
    ELEMENTWISE,
    METADATA,
    NEW,
    SHAPES,
    bare_name,
    writes,
)
from shardwise.memory.shard_tensor.function_call import Call
from shardwise.memory.shard_tensor.tensor_reductions import norms_of_list, over_ranks, reduce
from shardwise.memory.shard_tensor.use_errors import autograd_grad_called, wrong_replacement
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.torch_internals import end_graph

Row = Sequence[Tensor]
"""Operands of an elementwise function; the first one may be written to."""


def dispatch(call: Call) -> Any:
    """The result, or a ``ShardUseError`` if the function needs the full tensor."""
    for tensor in call.tensors():
        sharding = sharding_of(tensor) if isinstance(tensor, GatheredParameter) else None
        if sharding is not None and (engine := sharding.engine()) is not None:
            engine.rest()
    bare = bare_name(call.name)
    if call.name in _SPECIAL:
        return _SPECIAL[call.name](call)
    if bare in COUNTS or bare in SHAPES:
        return _shape(call, bare)
    if bare in METADATA:
        return call.mark(call.run(), call.first.sharding)
    if bare in NEW:
        return call.run()
    if bare in COPIES:
        return _copy(call)
    if bare in ELEMENTWISE and not (bare == "where" and len(call.values) == 1):
        return _elementwise(call)
    return reduce(call)


def gather_arguments(call: Call, refusal: ShardUseError) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather the arguments; outside a pass, or to write to a shard, is the ``refusal``."""
    shards = {id(shard): shard for shard in call.shards(call.tensors())}
    if call.func is torch.autograd.backward:  # ``inputs``, of which it reads no values
        return call.with_replacements({at: get_gradient_edge(shards[at]) for at in shards})
    serving = [(shard, shard.sharding.serving) for shard in shards.values()]
    if call.is_shard(call.written) or any(engine is None for _, engine in serving):
        end_graph()
        raise refusal
    replacements = dict[int, Tensor]()
    for shard, engine in serving:
        if isinstance(shard, nn.Parameter):
            engine.make_whole(shard.sharding.unit)  # type: ignore[attr-defined]
        else:
            replacements[id(shard)] = shard.sharding.whole(shard)
    return call.with_replacements(replacements)


# ---- element by element ------------------------------------------------------------------------


def _copy(call: Call) -> Any:
    """Copy of the first operand; of a second one dtype and device: in a pass, when it is whole."""
    source = call.args[0] if call.args else None
    if not call.is_shard(source):
        return call.run() if call.first.sharding.serving is None else call.unsupported()
    return call.recording_error() if call.records() else call.mark(call.run(), call.first.sharding)


def _elementwise(call: Call) -> Any:
    rows, written = call.rows(), writes(call.name)
    references = [next(iter(call.shards(row)), None) for row in rows]
    pairs: list[tuple[Row, Any]] = [
        pair for pair in zip(rows, references, strict=True) if pair[1] is not None
    ]
    local_parts = _local_parts(call, pairs) if written else {}
    alike = (
        _are_compatible(call, [local_parts.get(id(tensor), tensor) for tensor in row], reference)
        for row, reference in pairs
    )
    if "out" in call.kwargs or not all(alike):
        return call.unsupported()
    if call.records():
        return call.recording_error()
    if written:
        shardings = dict.fromkeys(_param_sharding(row[0]) for row, _ in pairs)
        for sharding in filter(None, shardings):
            sharding.before_write()
    result = call.run(local_parts)
    changed = [row[0] for row in rows] if result is None else result  # None: foreach, in place
    results = changed if isinstance(changed, (list, tuple)) else [changed]
    for tensor, reference in zip(results, references, strict=False):
        if reference is not None:
            call.mark(tensor, reference.sharding)
    return result


def _are_compatible(call: Call, row: Row, reference: Any) -> bool:
    """Can these operands be combined: shards that are cut alike, and plain tensors of their shape?

    Plain 0-dim tensors may scale, but not be written to, since they would get one rank's element.
    In a pass of the model plain tensors have the full shape.
    """
    plain = [tensor for tensor in row if not call.is_shard(tensor)]
    if not all(s.sharding.cuts_like(reference.sharding) for s in call.shards(row)):
        return False
    if plain and row[0] is plain[0] and plain[0].ndim == 0 and writes(call.name):
        return False
    sized = [tensor for tensor in plain if tensor.ndim]
    return not sized or (
        reference.sharding.serving is None
        and all(tensor.shape == reference.shape for tensor in sized)
    )


def _local_parts(call: Call, pairs: Iterable[tuple[Row, Any]]) -> dict[int, Tensor]:
    """Map, by id, each full tensor that is written to a shard to this rank's part of it.

    In a forward pass one parameter may be gathered and another one sharded.
    """
    return {
        id(tensor): call.mark(reference.sharding.cut(tensor, reference.shape), reference.sharding)
        for row, reference in pairs
        if id(row[0]) == id(reference) and reference.sharding.serving is not None
        for tensor in row
        if not call.is_shard(tensor) and tensor.ndim and tensor.shape == reference.sharding.shape
    }


def _param_sharding(tensor: Any) -> Sharding | None:
    """The sharding of the parameter whose memory this tensor uses, or ``None``."""
    sharding = sharding_of(tensor)
    is_alias = sharding is not None and id(tensor) in sharding.aliases
    return sharding if is_alias or isinstance(tensor, nn.Parameter) else None


def _set_where(call: Call) -> Any:
    """``shard[mask] = number``, as in ``gradient[gradient.isnan()] = 0``."""
    shard, mask, value = call.args
    scalar = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    if not (call.is_shard(shard) and call.is_shard(mask) and mask.dtype is torch.bool and scalar):
        return call.unsupported()
    filled = _elementwise(Call(Tensor.masked_fill_, call.args, {}, call.kind))
    return filled if isinstance(filled, ShardUseError) else None


def _equal(call: Call) -> Any:
    """``equal`` and ``allclose``: true if true on every rank."""
    (row,), reference = call.rows(), call.first
    if not _are_compatible(call, row, reference):
        return call.unsupported()
    local = torch.tensor([call.run()])
    label = Label(call.name, reference.sharding.name)
    return bool(over_ranks(local, torch.all, reference.sharding.axes, label))


def _unscale(call: Call) -> None:
    """GradScaler's unscale: a gradient that is not finite on one rank counts on every rank."""
    gradients, found_inf, factor = call.args
    engines = filter(None, [gradient.sharding.engine() for gradient in call.shards(gradients)])
    call.run()
    for comm in dict.fromkeys(engine.comm for engine in engines):
        found_inf.fill_(_found_inf_on_any_rank(found_inf, factor, comm))


def _found_inf_on_any_rank(found_inf: Tensor, factor: Tensor, comm: Comm) -> Tensor:
    """The largest ``found_inf``; the ranks' ``factor``, the scale's inverse, has to be equal."""
    mine = torch.stack([found_inf.reshape(()), factor.reshape(())]).to(comm.device)
    rows = comm.gather_rows(mine, Label("unscale", "gradients of a GradScaler"))
    scales = rows[:, 1].reciprocal().tolist()
    if other := next((rank for rank, scale in enumerate(scales) if scale != scales[0]), 0):
        raise RanksDisagree(
            f"a GradScaler has scale {scales[0]:g} on rank 0 and {scales[other]:g} on rank "
            f"{other}, so the mean of their gradients cannot be unscaled. Create it with one "
            "init_scale, load one state, and call update() after each step, on all ranks."
        )
    return rows[:, 0].amax()


# ---- attributes and aliases ----------------------------------------------------------------------


def _get(call: Call) -> Any:
    attribute = call.attribute
    if attribute in ("T", "mT", "H", "mH", "__cuda_array_interface__"):
        return call.unsupported()
    if attribute in ("shape", "ndim"):
        return _shape(call, attribute)
    if attribute == "data":
        return _alias(call)
    return call.mark(call.run(), call.first.sharding)


def _alias(call: Call) -> Any:
    """``data`` and ``detach()``: a shard in the same memory."""
    value = call.mark(call.run(), call.first.sharding)
    if (sharding := _param_sharding(call.first)) is not None:
        sharding.aliases[id(value)] = value
    return value


def _shape(call: Call, name: str) -> Any:
    """The shape of the shard; in a pass of the model, and where it counts, of the full tensor."""
    sharding: Sharding = call.first.sharding
    if name not in COUNTS and sharding.serving is None:
        return call.run()
    return call.run({id(call.first): torch.empty(sharding.shape, device="meta")})


def _set(call: Call) -> Any:
    if call.attribute != "data":
        return call.run()
    shard, value = call.args
    sharding: Sharding = shard.sharding
    if call.is_shard(value):
        if not value.sharding.cuts_like(sharding):
            return call.unsupported()
    elif sharding.serving is not None and value.shape == sharding.shape:
        value = sharding.cut(value, shard.shape)
    if (shard.shape, shard.dtype, shard.device) != (value.shape, value.dtype, value.device):
        raise wrong_replacement(sharding.name, shard, value)
    if not isinstance(shard, nn.Parameter):
        return call.run()
    sharding.before_write()
    sharding.copy_aliases()
    return shard.detach().copy_(value.detach())  # into the memory that the engine sends


def _autograd_grad(call: Call) -> Any:
    raise autograd_grad_called(call.first.sharding.name)


_SPECIAL: dict[str, Callable[[Call], Any]] = {
    "__get__": _get,
    "__set__": _set,
    "__delete__": Call.run,
    "__setitem__": _set_where,
    "detach": _alias,
    "constant_": torch.no_grad()(_elementwise),  # of ``nn.init``, which records nothing
    "grad": _autograd_grad,
    "_foreach_norm": norms_of_list,
    "equal": _equal,
    "allclose": _equal,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
