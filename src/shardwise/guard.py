"""A parameter at rest, which must not be used as if it were whole.

A rank's shard of an 8-wide norm may have one element, which broadcasts against anything: a
model that reads a parameter outside its unit would compute garbage without an error. DTensor
answers with a tensor subclass in every operation; here only a parameter *at rest* changes its
class (the object stays the same), and while its unit is gathered it is a plain ``Parameter``
again, so computing pays nothing.

What is right on shards stays allowed: metadata, and elementwise functions among tensors of the
shard's shape. Everything else raises, on every rank alike, with one exception: without autograd,
elementwise, with a tensor of the *whole* parameter's shape, a rank that happens to hold all of
the parameter computes what was meant. The others raise, and their error ends the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, ShardUseError

__all__ = [
    "ShardedParameter",
    "Sharding",
    "get_grad",
    "handed_out",
    "replaced",
    "set_grad",
    "sharding_of",
]


@dataclass(frozen=True)
class Sharding:
    """Where a parameter's elements are; every parameter of a sharded model carries one.

    Attributes:
        name: the parameter's first full name.
        unit: its unit's name.
        placement: ``"fully_sharded"`` or ``"replicated"`` (the optimizer sees all of it).
        shape: the whole parameter's shape.
        start, stop: the range of the flattened parameter that this rank stores.
        atom: elements that are never split between ranks (a row, or 1).
    """

    name: str
    unit: str
    placement: str
    shape: torch.Size
    start: int
    stop: int
    atom: int

    def cut(self, whole: Tensor, local_shape: torch.Size) -> Tensor:
        """This rank's part of ``whole`` (``shape`` elements), in the shape of its shard."""
        return whole.reshape(-1)[self.start : self.stop].view(local_shape)


def sharding_of(param: Tensor) -> Sharding | None:
    """The parameter's sharding, or ``None`` for a tensor of an unsharded model."""
    return getattr(param, "sharding", None)


_GRAD: Any = Tensor.grad
#: What ``param.grad = ...`` does, for a parameter at rest or not: ``set_grad(param, value)``.
set_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
get_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__


class ShardedParameter(nn.Parameter):
    """The class of a parameter while it holds one rank's shard."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            _refuse_misuse(func, (*args, *kwargs.values()))
            return func(*args, **kwargs)

    # Read and set for every parameter in every step: a property of our own costs a fifth of
    # what the function above does.
    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the mean gradient."""
        if _is_clipped():
            raise _clipped()
        with torch._C.DisableTorchFunctionSubclass():
            return get_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ShardUseError(
            f"{_described(self)}; a deep copy of it would be one rank's part of a parameter. "
            "Deep-copy the model that was given to shard(): that gathers a plain, whole copy."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardUseError(
            f"{_described(self)}; pickling it would lose the other ranks' parts. Save "
            "model.state_dict() (whole tensors) or sharded.local_state_dict() (shards)."
        )


def _refuse_misuse(func: Callable[..., Any], values: tuple[Any, ...]) -> None:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        _refuse_attribute(name, getattr(_owner(func), "__name__", ""), values)
    elif name == "_has_compatible_shallow_copy_type":  # module.to(...), before it sets .data
        _refuse_replacement(*values)
    elif name == "grad":
        raise handed_out(_name(_first(values)))
    elif not _is_right(_bare(name), values):
        raise _misuse(name, values)


def _owner(func: Callable[..., Any]) -> object:
    """Of ``Tensor.T.__get__``: the attribute ``T``."""
    return getattr(func, "__self__", None)


def _refuse_attribute(access: str, attribute: str, values: tuple[Any, ...]) -> None:
    if attribute in ("T", "mT", "H", "mH"):
        raise _misuse(f".{attribute}", values)
    if attribute == "data" and access == "__set__":
        _refuse_replacement(*values)


def _clipped() -> ShardUseError:
    return ShardUseError(
        "torch.nn.utils.clip_grad_norm_ on a sharded model would clip by the norm of this "
        "rank's shards, another norm on every rank. Use sharded.clip_grad_norm_(max_norm), "
        "which forms the norm over all ranks with one collective."
    )


def _is_clipped() -> bool:
    """Does torch's clipping read the gradient? It shows no function of its own to intercept."""
    frame: FrameType | None = sys._getframe(2)  # this, the property, the reader
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        if frame.f_code.co_name == "clip_grad_norm_":
            return True
        frame = frame.f_back  # a comprehension has a frame of its own before Python 3.12
    return False


def _refuse_replacement(shard: Tensor, value: Tensor) -> None:
    if (shard.shape, shard.dtype, shard.device) != (value.shape, value.dtype, value.device):
        raise replaced(_name(shard), shard, value)


def _is_right(bare: str, values: tuple[Any, ...]) -> bool:
    if bare in _RIGHT_UNRECORDED:
        return not _records(values) and not any(map(_differ, _operands(values)))
    return bare in _ALWAYS_RIGHT


def _bare(name: str) -> str:
    """``__iadd__``, ``_foreach_add_`` and ``add_`` are all ``add``; ``__float__`` is no copy."""
    if name == "__float__":
        return name
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        return bare[1:] if bare[:1] in "ir" and bare[1:] in _RIGHT_UNRECORDED else bare
    return name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _operands(values: Iterable[Any]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors that meet each other; lists of tensors (foreach) pair up."""
    single = [value for value in values if isinstance(value, Tensor)]
    lists = [
        value
        for value in values
        if isinstance(value, (list, tuple)) and next(_tensors(value), None) is not None
    ]
    for row in zip(*lists, strict=False) if lists else [()]:
        yield (*single, *_tensors(row))


def _differ(operands: tuple[Tensor, ...]) -> bool:
    """Would a shard broadcast, or meet another part of another parameter?"""
    shards = [t for t in operands if isinstance(t, ShardedParameter)]
    others = [t.shape for t in operands if t.ndim > 0]  # a 0-dim tensor only scales
    parts = {(s.shape, s.start, s.stop) for shard in shards if (s := sharding_of(shard))}
    return bool(shards) and (len({shards[0].shape, *others}) > 1 or len(parts) > 1)


def _records(values: tuple[Any, ...]) -> bool:
    """Would autograd record this, as if the shard were a whole parameter of a loss?"""
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(values))


def _first(values: Iterable[Any]) -> Tensor:
    return next(t for t in _tensors(values) if isinstance(t, ShardedParameter))


def _name(shard: Tensor) -> str:
    sharding = sharding_of(shard)
    return "" if sharding is None else sharding.name


def handed_out(name: str) -> ShardUseError:
    """``torch.autograd.grad`` was asked for the gradient of the parameter of this name."""
    return ShardUseError(
        f"torch.autograd.grad was asked for the gradient of parameter {name!r}, which the ranks "
        "share: what it hands out would be this rank's alone, never averaged with the others'. "
        "Call loss.backward() and read .grad (this rank's shard of the mean); or compute inside "
        "`with sharded.full_params():`, where parameters are whole, and average it yourself."
    )


def replaced(name: str, shard: Tensor, value: Tensor) -> ConfigError:
    """``value`` was put in place of a shard that it cannot stand for."""
    return ConfigError(
        f"parameter {name!r} was replaced by a tensor of shape {tuple(value.shape)}, "
        f"{value.dtype} on {value.device}; its shard is {tuple(shard.shape)}, {shard.dtype} on "
        f"{shard.device}. After shard() a model's dtype and device are fixed: set them before "
        "shard(), or with precision=sw.Precision(...). Whole values go in by "
        "model.load_state_dict() or inside `with sharded.full_params(writeback=True):`."
    )


def _misuse(function: str, values: Iterable[Any]) -> ShardUseError:
    return ShardUseError(
        f"{_described(_first(values))}, and {function!r} needs the whole of it. It is whole only "
        "while its unit computes: call the model or the module through model(...), not "
        ".forward(...), and let the unit's own modules read it; name another method that is called "
        "from outside by sharded.register_forward_method(module, 'encode'); or read it inside "
        "`with sharded.full_params():`; or take this rank's shard on purpose with .detach()."
    )


def _described(shard: Tensor) -> str:
    sharding = sharding_of(shard)
    if sharding is None:
        return f"this parameter is a shard of shape {tuple(shard.shape)}"
    return (
        f"parameter {sharding.name!r} is at rest: this rank holds elements {sharding.start:,} to "
        f"{sharding.stop:,} of {sharding.shape.numel():,} (shard {tuple(shard.shape)} of "
        f"{tuple(sharding.shape)}, unit {sharding.unit or '(root)'!r})"
    )


_METADATA = """
    detach zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones
    new_empty new_full new_tensor requires_grad size dim ndimension numel nelement stride
    storage_offset element_size is_floating_point is_complex is_contiguous is_signed is_sparse
    is_cuda is_meta is_inference data_ptr storage untyped_storage get_device has_names is_shared
    is_pinned is_same_size type register_hook register_post_accumulate_grad_hook retain_grad repr
    format hash len delattr setattr _is_view result_type can_cast is_tensor is_storage
    dlpack_device
"""
_COPIES = """
    clone to cpu cuda xpu contiguous float double half bfloat16 type_as copy numpy tolist
    share_memory pin_memory view_as
"""
_ELEMENTWISE = """
    add sub mul div truediv neg pos abs sqrt rsqrt pow square exp log sign clamp clamp_min clamp_max
    lerp addcmul addcdiv where maximum minimum zero fill eq ne lt le gt ge isnan isinf isfinite
    isclose equal allclose round floor reciprocal nan_to_num masked_fill subtract multiply divide
    negative absolute erfinv sgd adam adamw adagrad
"""
_ALWAYS_RIGHT = frozenset(_METADATA.split())
_RIGHT_UNRECORDED = frozenset((_COPIES + _ELEMENTWISE).split())
