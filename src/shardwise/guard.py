"""A parameter at rest, which must not be used as if it were whole.

A rank's shard of an 8-wide norm may have one element, which broadcasts against anything: a
model that reads a parameter outside its unit would compute garbage without an error. DTensor
answers with a tensor subclass in every operation; here only a parameter *at rest* changes its
class (the object stays the same), and while its unit is gathered it is a plain ``Parameter``
again, so computing pays nothing.

What is right on shards stays allowed: metadata, and elementwise functions among shards of the
same shape. Everything else raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardUseError

__all__ = ["ShardedParameter", "Sharding", "sharding_of"]


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
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            values = (*args, *kwargs.values())
            bare = _bare(name)
            right = bare in _RIGHT_ON_SHARDS and not _shapes_differ(values)
            if not right or (bare in _RECORDED and _records(values)):
                raise _misuse(name, values)
            return func(*args, **kwargs)

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


def _bare(name: str) -> str:
    """``__iadd__``, ``_foreach_add_`` and ``add_`` are all ``add``."""
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        return bare[1:] if bare[:1] in "ir" and bare[1:] in _RIGHT_ON_SHARDS else bare
    return name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_")


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _shapes_differ(values: tuple[Any, ...]) -> bool:
    """Are there tensors beside the shard, of another shape, that would broadcast?"""
    if any(isinstance(value, (list, tuple)) for value in values):  # foreach: lists pair up
        return False
    shapes = {tensor.shape for tensor in _tensors(values) if tensor.ndim > 0}
    return len(shapes) > 1


def _records(values: tuple[Any, ...]) -> bool:
    """Would autograd record this, as if the shard were a whole parameter of a loss?"""
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(values))


def _misuse(function: str, values: tuple[Any, ...]) -> ShardUseError:
    shard = next(t for t in _tensors(values) if isinstance(t, ShardedParameter))
    return ShardUseError(
        f"{_described(shard)}, and {function!r} needs the whole of it. It is whole only while "
        "its unit computes: call the model or the module through model(...), not .forward(...), "
        "and let the unit's own modules read it; or read it inside "
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
    detach data zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones
    new_empty new_full new_tensor requires_grad_
    get set size dim ndimension numel nelement stride storage_offset element_size is_floating_point
    is_complex is_contiguous is_signed is_sparse is_cuda is_meta is_inference is_nonzero data_ptr
    storage untyped_storage get_device has_names is_shared is_pinned is_same_size type requires_grad
    register_hook register_post_accumulate_grad_hook retain_grad backward repr format hash len
    delattr setattr broadcast_to_none _is_view _backward_hooks result_type can_cast is_tensor
    is_storage _version __dlpack_device__ dlpack_device
"""
_COPIES = """
    clone to cpu cuda xpu contiguous float double half bfloat16 type_as copy numpy tolist
    share_memory pin_memory view_as
"""
_ELEMENTWISE = """
    add sub mul div truediv neg pos abs sqrt rsqrt pow square exp log sign clamp clamp_min clamp_max
    lerp addcmul addcdiv where maximum minimum zero fill normal uniform trunc_normal eq ne lt le gt
    ge isnan isinf isfinite isclose equal allclose round floor reciprocal nan_to_num masked_fill
    subtract multiply divide negative absolute erfinv bernoulli random
"""
_RECORDED = frozenset((_COPIES + _ELEMENTWISE).split())
_RIGHT_ON_SHARDS = _RECORDED | frozenset(_METADATA.split())
