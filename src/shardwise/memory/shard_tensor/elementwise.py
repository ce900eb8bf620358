"""Names of functions that are right on shards.

Right is what asks for nothing but the shard's own metadata, and what treats each element by
itself. Whether its operands are cut alike is decided where they are known (``shard_tensor``).
"""

from __future__ import annotations

from functools import cache


@cache
def bare_name(name: str) -> str:
    """``__iadd__``, ``_foreach_add_`` and ``add_`` are all ``add``; ``__float__`` is no copy."""
    if name == "__float__":
        return name
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        return bare[1:] if bare[:1] in "ir" and bare[1:] in ELEMENTWISE else bare
    return name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_")


def writes(name: str) -> bool:
    """Does the elementwise function of this name write into its first operand?"""
    if name.startswith("__"):
        return name[2:3] == "i" and bare_name(name) != name.strip("_")
    return name.endswith("_")


_METADATA = """
    detach zeros_like ones_like empty_like full_like rand_like randn_like requires_grad stride
    storage_offset element_size is_floating_point is_complex is_contiguous
    is_signed is_sparse is_cuda is_meta is_inference get_device has_names is_shared is_pinned
    is_same_size type register_hook register_post_accumulate_grad_hook retain_grad repr format hash
    delattr setattr _is_view result_type can_cast is_tensor is_storage dlpack_device
    _has_compatible_shallow_copy_type
"""
_COPIES = """
    clone to cpu cuda xpu contiguous float double half bfloat16 type_as share_memory pin_memory
"""
_ELEMENTWISE = """
    add sub mul div truediv floordiv floor_divide remainder fmod mod neg pos abs sqrt rsqrt pow
    float_power square exp exp2 expm1 log log2 log10 log1p sin cos tanh sigmoid sign sgn clamp clip
    clamp_min clamp_max lerp addcmul addcdiv where maximum minimum fmax fmin zero fill copy round
    isposinf isneginf isclose floor ceil trunc frac reciprocal nan_to_num masked_fill subtract
    multiply divide true_divide negative absolute erf erfinv hypot atan2 copysign logical_and
    logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor and or xor
    invert relu sgd adam adamw adagrad
"""
METADATA = frozenset(_METADATA.split())
# Of the whole: a sum over a count is a mean, and a shard of none of a scalar's elements has one
# dimension more.
COUNTS = frozenset({"numel", "nelement", "dim", "ndimension", "ndim"})
SHAPES = frozenset({"size", "len"})
# They take a dtype and a device from the shard, and a shape from whoever calls.
NEW = frozenset({"new_zeros", "new_ones", "new_empty", "new_full"})
COPIES = frozenset(_COPIES.split())
"""Of their first operand; another tensor says nothing but a dtype and a device."""
# Element by element, too, and autograd records none of them.
PREDICATES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"})
ELEMENTWISE = frozenset(_ELEMENTWISE.split()) | PREDICATES
