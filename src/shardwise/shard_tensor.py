"""One rank's part of a value that is shaped like a parameter: a gradient, a moving average.

A plain tensor that holds a part of a gradient answers ``norm()``, ``isfinite().all()`` or
``histc()`` with one rank's numbers, silently, and the ranks drift apart. So what is read of a
parameter at rest is of this class, and so is every elementwise result of it. It costs nothing
where nobody reads: a gradient gets its class when it is read (see ``guard``), and an optimizer
sees plain tensors (see ``optim.gate``).

A function on shards
- that asks for metadata, or treats each element by itself among tensors that are cut alike, is
  carried out on this rank, and what it gives is a shard again. A shard that is cut otherwise is
  gathered first, and cut like the others;
- that reduces all elements to one number gives every rank the global one, by a small collective;
- that needs anything else is refused, on every rank alike, with one exception. Elementwise, with a
  plain tensor of the *whole* shape, a rank that happens to hold all elements computes what was
  meant. The others raise, and their error ends the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.elementwise import COPIES, ELEMENTWISE, METADATA, NEW, bare_name, writes
from shardwise.reductions import joined_norm, over_ranks, reduction_of, vector_norm
from shardwise.refusals import clipped, handed_out, lost, misused, recorded, replaced
from shardwise.sharding import Sharding, sharding_of

__all__ = ["ShardTensor", "marked"]


class ShardTensor(Tensor):
    """One rank's part of a value that is shaped like a parameter.

    Attributes:
        sharding: the parameter's.
    """

    sharding: Sharding

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(_Call(func, args, kwargs or {}))

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor in the same memory, for whatever purpose."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def full_tensor(self) -> Tensor:
        """The whole, plain and detached, in new memory on every rank. A collective."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharding.whole(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            copied = memo[id(self)] = marked(self.detach().clone(), self.sharding)
            return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise lost(self, "pickling")


def marked(tensor: Tensor, sharding: Sharding) -> Tensor:
    """The same tensor as a shard, if its class is the plain one."""
    if type(tensor) is Tensor:
        tensor.sharding = sharding  # type: ignore[attr-defined]
        tensor.__class__ = ShardTensor
    return tensor


class _Call:
    """A function that was called with shards among its arguments."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = getattr(func, "__name__", str(func))
        self.values = (*args, *kwargs.values())

    @property
    def first(self) -> ShardTensor:
        """The first shard, to speak of."""
        return next(t for t in _tensors(self.values) if isinstance(t, ShardTensor))

    @property
    def attribute(self) -> str:
        """Of ``Tensor.T.__get__``: ``T``."""
        accesses = self.name in ("__get__", "__set__", "__delete__")
        return getattr(getattr(self.func, "__self__", None), "__name__", "") if accesses else ""

    def records(self) -> bool:
        """Would autograd record this, as if a shard were a whole parameter of a loss?"""
        return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(self.values))

    def rows(self) -> list[tuple[Tensor, ...]]:
        """The tensors that meet each other; first the one that may be written to.

        The tensors of lists (foreach) pair up, and meet those that stand alone.
        """
        alone = [value for value in self.values if isinstance(value, Tensor)]
        lists = [list(_tensors(value)) for value in self.values if isinstance(value, (list, tuple))]
        filled = [tensors for tensors in lists if tensors]
        return [(*row, *alone) for row in (zip(*filled, strict=False) if filled else [()])]

    def run(self, instead: dict[int, Tensor] | None = None) -> Any:
        """Carry it out on this rank's parts; ``instead`` of some of them, by id, on others."""
        if not instead:
            return self.func(*self.args, **self.kwargs)
        kwargs = {name: _exchanged(value, instead) for name, value in self.kwargs.items()}
        return self.func(*_exchanged(self.args, instead), **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _exchanged(value: Any, instead: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_exchanged(one, instead) for one in value)
    return instead.get(id(value), value)


# ---- what a call gives; inside, no subclass intercepts -----------------------------------------

_NEEDS_WHOLE = object()


def _answer(call: _Call) -> Any:
    bare = bare_name(call.name)
    if call.name in _SPECIAL:
        answer = _SPECIAL[call.name](call)
    elif bare in METADATA:
        answer = _shaped_like(call.first, call.run())
    elif bare in NEW:
        answer = call.run()
    elif bare in COPIES:
        answer = _copy(call)
    elif bare in ELEMENTWISE and not (bare == "where" and len(call.values) == 1):
        answer = _elementwise(call)
    else:
        answer = _reduction(call)
    if answer is _NEEDS_WHOLE:
        raise misused(f".{call.attribute}" if call.attribute else call.name, call.first)
    return answer


def _shaped_like(shard: ShardTensor, result: Any) -> Any:
    return marked(result, shard.sharding) if isinstance(result, Tensor) else result


def _copy(call: _Call) -> Any:
    """Of the first operand; another one says nothing but a dtype and a device."""
    source = call.args[0] if call.args else None
    if not isinstance(source, ShardTensor):
        return call.run()
    if call.records():
        raise recorded(call.name, source)
    return _shaped_like(source, call.run())


def _elementwise(call: _Call) -> Any:
    rows = call.rows()
    likes = [next((t for t in row if isinstance(t, ShardTensor)), None) for row in rows]
    pairs = [(row, like) for row, like in zip(rows, likes, strict=True) if like is not None]
    if "out" in call.kwargs or not all(_meet(*pair, writes(call.name)) for pair in pairs):
        return _NEEDS_WHOLE
    if call.records():
        raise recorded(call.name, call.first)
    result = call.run(_cut_alike(pairs))
    results = result if isinstance(result, (list, tuple)) else [result]
    if result is None:  # foreach, in place
        results = [row[0] for row in rows]
    for one, shard in zip(results, likes, strict=False):
        if isinstance(one, Tensor) and shard is not None:
            marked(one, shard.sharding)
    return result


def _meet(row: Sequence[Tensor], like: ShardTensor, written: bool) -> bool:
    """May these meet element by element? A plain 0-dim tensor only scales."""
    shards = [tensor for tensor in row if isinstance(tensor, ShardTensor)]
    plain = [tensor for tensor in row if not isinstance(tensor, ShardTensor)]
    if any(shard.sharding.shape != like.sharding.shape for shard in shards):
        return False
    if written and plain and row[0] is plain[0] and plain[0].ndim == 0:
        return False
    return all(tensor.ndim == 0 or tensor.shape == like.shape for tensor in plain)


def _cut_alike(pairs: Iterable[tuple[Sequence[Tensor], ShardTensor]]) -> dict[int, Tensor]:
    """By id, what stands for a shard that is cut unlike those that it meets. Collectives."""
    instead = dict[int, Tensor]()
    for row, like in pairs:
        for shard in row:
            if isinstance(shard, ShardTensor) and not shard.sharding.cuts_like(like.sharding):
                whole = shard.sharding.whole(shard)
                instead[id(shard)] = like.sharding.cut(whole, like.shape)
    return instead


# ---- one number over all elements ---------------------------------------------------------------


def _reduction(call: _Call) -> Any:
    shard, others = (call.args or (None,))[0], list(_tensors(call.values))
    if not isinstance(shard, ShardTensor) or len(others) > 1:
        return _NEEDS_WHOLE
    numel = shard.sharding.shape.numel()
    reduction = reduction_of(call.name, call.args[1:], call.kwargs, shard, numel)
    if reduction is None:
        return _NEEDS_WHOLE
    if call.records():
        raise recorded(call.name, shard)
    if "norm" in call.name and _is_clipping():
        raise clipped()
    label = Label(call.name.removeprefix("linalg_"), shard.sharding.name)
    number = reduction.part(shard).reshape(1)
    return over_ranks(number, reduction.combine, shard.sharding.comm, label)[0].to(reduction.dtype)


def _foreach_norm(call: _Call) -> Any:
    """Of a list: one collective for its shards of one group."""
    if call.records():
        raise recorded(call.name, call.first)
    if _is_clipping():
        raise clipped()
    tensors = list(call.args[0])
    order = float(call.kwargs.get("ord", (*call.args[1:], 2.0)[0]))
    norms = [vector_norm(tensor, order) for tensor in tensors]
    comms = {id(t.sharding.comm): t.sharding.comm for t in tensors if isinstance(t, ShardTensor)}
    for comm in comms.values():
        at = [i for i, t in enumerate(tensors) if _is_of(t, comm)]
        mine = torch.stack([norms[i].double() for i in at])
        label = Label("norm", f"of {len(at)} shards")
        whole = over_ranks(mine, partial(joined_norm, order), comm, label)
        norms = [whole[at.index(i)] if i in at else norm for i, norm in enumerate(norms)]
    dtype = call.kwargs.get("dtype")
    return [norm.to(dtype or t.dtype) for norm, t in zip(norms, tensors, strict=True)]


def _is_of(tensor: Tensor, comm: Comm) -> bool:
    return isinstance(tensor, ShardTensor) and tensor.sharding.comm is comm


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


def _set_where(call: _Call) -> Any:
    """``shard[mask] = number``, as in ``gradient[gradient.isnan()] = 0``."""
    shard, mask, value = call.args
    masked = isinstance(shard, ShardTensor) and isinstance(mask, ShardTensor)
    scalar = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
    if not masked or mask.dtype is not torch.bool or not scalar:
        return _NEEDS_WHOLE
    _elementwise(_Call(Tensor.masked_fill_, call.args, {}))
    return None


def _same(call: _Call) -> Any:
    """``equal`` and ``allclose``: on every rank."""
    (row,) = call.rows()
    like = call.first
    if not _meet(row, like, written=False):
        return _NEEDS_WHOLE
    here = torch.tensor([call.run(_cut_alike([(row, like)]))])
    label = Label(call.name, like.sharding.name)
    return bool(over_ranks(here, torch.all, like.sharding.comm, label))


def _unscale(call: _Call) -> None:
    """GradScaler's: what one rank found not to be finite is found on every rank."""
    call.run()
    gradients, found = call.args[:2]
    comms = {id(g.sharding.comm): g.sharding.comm for g in gradients if isinstance(g, ShardTensor)}
    for comm in comms.values():
        label = Label("unscale", "gradients")
        found.copy_(over_ranks(found.reshape(1), torch.amax, comm, label).reshape(found.shape))


# ---- attributes, and what torch asks before it replaces a tensor ---------------------------------


def _get(call: _Call) -> Any:
    if call.attribute in ("T", "mT", "H", "mH"):
        return _NEEDS_WHOLE
    value = call.run()
    return marked(value, call.first.sharding) if call.attribute == "data" else value


def _set(call: _Call) -> Any:
    if call.attribute == "data":
        _check_replacement(*call.args)
    return call.run()


def _may_replace(call: _Call) -> Any:
    """``module.to(...)`` asks before it sets ``.data``."""
    _check_replacement(*call.args)
    return call.run()


def _check_replacement(shard: Tensor, value: Tensor) -> None:
    if (shard.shape, shard.dtype, shard.device) != (value.shape, value.dtype, value.device):
        sharding = sharding_of(shard)
        raise replaced("" if sharding is None else sharding.name, shard, value)


def _autograd_grad(call: _Call) -> Any:
    raise handed_out(call.first.sharding.name)


_SPECIAL: dict[str, Callable[[_Call], Any]] = {
    "__get__": _get,
    "__set__": _set,
    "__delete__": _Call.run,
    "__setitem__": _set_where,
    "_has_compatible_shallow_copy_type": _may_replace,
    "grad": _autograd_grad,
    "_foreach_norm": _foreach_norm,
    "equal": _same,
    "allclose": _same,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
