"""What torch's functions give on shards: a shard again, one number for all ranks, or a refusal.

The rules are those of ``shard_tensor``. A refusal is returned, and not raised: in a pass of the
model the caller may serve what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.calls import Call
from shardwise.comm.protocol import Label
from shardwise.elementwise import COPIES, ELEMENTWISE, METADATA, NEW, SHAPES, bare_name, writes
from shardwise.errors import ShardUseError
from shardwise.reductions import norms_of_list, over_ranks, reduced
from shardwise.refusals import handed_out, replaced
from shardwise.sharding import Sharding, sharding_of

__all__ = ["answer", "made_whole"]

Row = Sequence[Tensor]
"""Tensors that meet each other element by element; first the one that may be written to."""


def answer(call: Call) -> Any:
    """The result; a ``ShardUseError`` where the whole is needed."""
    bare = bare_name(call.name)
    if call.name in _SPECIAL:
        return _SPECIAL[call.name](call)
    if bare in SHAPES:
        return _shape(call)
    if bare in METADATA:
        return call.mark(call.run(), call.first.sharding)
    if bare in NEW:
        return call.run()
    if bare in COPIES:
        return _copy(call)
    if bare in ELEMENTWISE and not (bare == "where" and len(call.values) == 1):
        return _elementwise(call)
    return reduced(call)


def made_whole(call: Call, refusal: ShardUseError) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, whole, if a pass of the model is under way. Collectives.

    Raises:
        ShardUseError: ``refusal``; also where the call writes to a shard, which would not change.
    """
    shards = {id(shard): shard for shard in call.shards(call.tensors())}
    serving = [(shard, shard.sharding.serving) for shard in shards.values()]
    if call.is_shard(call.written) or any(engine is None for _, engine in serving):
        raise refusal
    instead = dict[int, Tensor]()
    for shard, engine in serving:
        if isinstance(shard, nn.Parameter):
            engine.make_whole(shard.sharding.unit)  # type: ignore[attr-defined]
        else:
            instead[id(shard)] = shard.sharding.whole(shard)
    return call.exchanged(instead)


# ---- element by element ------------------------------------------------------------------------


def _copy(call: Call) -> Any:
    """Of the first operand; another one says nothing but a dtype and a device."""
    source = call.args[0] if call.args else None
    if not call.is_shard(source):
        return call.run()
    return call.recorded() if call.records() else call.mark(call.run(), call.first.sharding)


def _elementwise(call: Call) -> Any:
    rows, written = call.rows(), writes(call.name)
    likes = [next(iter(call.shards(row)), None) for row in rows]
    pairs: list[tuple[Row, Any]] = [
        (row, like) for row, like in zip(rows, likes, strict=True) if like is not None
    ]
    parts = _parts(call, pairs) if written else {}
    met = [([parts.get(id(one), one) for one in row], like) for row, like in pairs]
    if "out" in call.kwargs or not all(_meet(call, *pair) for pair in met):
        return call.misused()
    if call.records():
        return call.recorded()
    instead = parts | _cut_alike(call, met)
    if written:
        _announce(row[0] for row, _ in pairs)
    result = call.run(instead)
    changed = [row[0] for row in rows] if result is None else result  # None: foreach, in place
    results = changed if isinstance(changed, (list, tuple)) else [changed]
    for one, like in zip(results, likes, strict=False):
        if like is not None:
            call.mark(one, like.sharding)
    return result


def _meet(call: Call, row: Row, like: Any) -> bool:
    """May these meet? Shards of one shape, plain tensors of this one's, and 0-dim ones that scale.

    A plain 0-dim tensor that is written to would keep one rank's element. In a pass of the model
    plain tensors are whole ones, also where this rank happens to hold all elements.
    """
    plain = [tensor for tensor in row if not call.is_shard(tensor)]
    if any(s.sharding.shape != like.sharding.shape for s in call.shards(row)):
        return False
    if plain and row[0] is plain[0] and plain[0].ndim == 0 and writes(call.name):
        return False
    sized = [tensor for tensor in plain if tensor.ndim]
    return not sized or (
        like.sharding.serving is None and all(tensor.shape == like.shape for tensor in sized)
    )


def _parts(call: Call, pairs: Iterable[tuple[Row, Any]]) -> dict[int, Tensor]:
    """By id, this rank's part of each whole tensor that is written to a shard.

    In a forward pass, where one parameter may be whole and the other at rest.
    """
    return {
        id(one): call.mark(like.sharding.cut(one, like.shape), like.sharding)
        for row, like in pairs
        if id(row[0]) == id(like) and like.sharding.serving is not None
        for one in row
        if not call.is_shard(one) and one.ndim and one.shape == like.sharding.shape
    }


def _cut_alike(call: Call, pairs: Iterable[tuple[Row, Any]]) -> dict[int, Tensor]:
    """By id, what stands for a shard that is cut unlike those that it meets. Collectives."""
    instead = dict[int, Tensor]()
    for row, like in pairs:
        for shard in call.shards(row):
            if not shard.sharding.cuts_like(like.sharding):
                whole = shard.sharding.whole(shard)
                instead[id(shard)] = like.sharding.cut(whole, like.shape)
    return instead


def _announce(written: Iterable[Tensor]) -> None:
    """Before parameters are written at rest, themselves or by what was lent of them."""
    for sharding in dict.fromkeys(map(_owner, written)):
        if sharding is not None:
            sharding.before_write()


def _owner(tensor: Any) -> Sharding | None:
    """The sharding of the parameter whose memory this is."""
    sharding = sharding_of(tensor)
    lent = sharding is not None and id(tensor) in sharding.lent
    return sharding if lent or isinstance(tensor, nn.Parameter) else None


def _set_where(call: Call) -> Any:
    """``shard[mask] = number``, as in ``gradient[gradient.isnan()] = 0``."""
    shard, mask, value = call.args
    scalar = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    if not (call.is_shard(shard) and call.is_shard(mask) and mask.dtype is torch.bool and scalar):
        return call.misused()
    filled = _elementwise(Call(Tensor.masked_fill_, call.args, {}, call.kind))
    return filled if isinstance(filled, ShardUseError) else None


def _same(call: Call) -> Any:
    """``equal`` and ``allclose``: on every rank."""
    (row,), like = call.rows(), call.first
    if not _meet(call, row, like):
        return call.misused()
    here = torch.tensor([call.run(_cut_alike(call, [(row, like)]))])
    label = Label(call.name, like.sharding.name)
    return bool(over_ranks(here, torch.all, like.sharding.comm, label))


def _unscale(call: Call) -> None:
    """GradScaler's: what one rank found not to be finite is found on every rank."""
    call.run()
    gradients, found = call.args[:2]
    label = Label("unscale", "gradients")
    for comm in {id(g.sharding.comm): g.sharding.comm for g in call.shards(gradients)}.values():
        everywhere = over_ranks(found.reshape(1), torch.amax, comm, label)
        found.copy_(everywhere.reshape(found.shape))


# ---- attributes and aliases ----------------------------------------------------------------------


def _get(call: Call) -> Any:
    attribute = call.attribute
    if attribute in ("T", "mT", "H", "mH"):
        return call.misused()
    if attribute == "shape":
        return _shape(call)
    return _alias(call) if attribute == "data" else call.run()


def _alias(call: Call) -> Any:
    """``data`` and ``detach()``: a shard in the same memory."""
    value = call.mark(call.run(), call.first.sharding)
    if (sharding := _owner(call.first)) is not None:
        sharding.lent[id(value)] = value
    return value


def _shape(call: Call) -> Any:
    """Of the shard; in a pass of the model, which may read the whole, of that."""
    sharding: Sharding = call.first.sharding
    if sharding.serving is None:
        return call.run()
    return call.run({id(call.first): torch.empty(sharding.shape, device="meta")})


def _set(call: Call) -> Any:
    if call.attribute != "data":
        return call.run()
    shard, value = call.args
    sharding: Sharding = shard.sharding
    if call.is_shard(value):
        if value.sharding.shape != sharding.shape:
            return call.misused()
        value = _cut_alike(call, [((value,), shard)]).get(id(value), value)
    elif sharding.serving is not None and value.shape == sharding.shape:
        value = sharding.cut(value, shard.shape)
    _check_replacement(shard, value)
    if not isinstance(shard, nn.Parameter):
        return call.run()
    sharding.before_write()
    sharding.end_loans()
    return shard.detach().copy_(value)  # into the memory that the engine sends


def _may_replace(call: Call) -> Any:
    """``module.to(...)`` asks before it sets ``.data``."""
    _check_replacement(*call.args)
    return call.run()


def _check_replacement(shard: Tensor, value: Tensor) -> None:
    if (shard.shape, shard.dtype, shard.device) != (value.shape, value.dtype, value.device):
        sharding = sharding_of(shard)
        raise replaced("" if sharding is None else sharding.name, shard, value)


def _autograd_grad(call: Call) -> Any:
    raise handed_out(call.first.sharding.name)


_SPECIAL: dict[str, Callable[[Call], Any]] = {
    "__get__": _get,
    "__set__": _set,
    "__delete__": Call.run,
    "__setitem__": _set_where,
    "detach": _alias,
    "_has_compatible_shallow_copy_type": _may_replace,
    "grad": _autograd_grad,
    "_foreach_norm": norms_of_list,
    "equal": _same,
    "allclose": _same,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
