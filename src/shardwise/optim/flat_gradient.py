"""The gradients of a bucket's slots in one piece.

A backward pass leaves each parameter a view of one buffer that is laid out like the shard, and
that buffer is what a fused kernel should read. Whether the gradients still are its views is seen
by their addresses: inside the memory of a living storage there is nobody else's. Where the user
put other tensors in their place, they are copied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

import torch
from torch import Tensor

from shardwise.optim.held import Held

__all__ = ["FlatGradient", "flat_gradient"]


@dataclass(frozen=True)
class FlatGradient:
    """Gradients, laid out like the shard.

    Attributes:
        flat: ``[S]``; what belongs to no gradient may be anything.
        copied: each gradient with its copy, where ``flat`` is not their own memory.
    """

    flat: Tensor
    copied: Sequence[tuple[Tensor, Tensor]] = ()

    def give_back(self) -> None:
        """Let the gradients be what their copies became."""
        for gradient, copy in self.copied:
            gradient.copy_(copy)


def flat_gradient(held: Held, gradients: Sequence[Tensor | None]) -> FlatGradient:
    """The gradients of these slots, copied only where it must be.

    Args:
        held: the slots.
        gradients: of each of them, in its shape; ``None`` where there is none.
    """
    own = _own_memory(held, gradients)
    if own is not None:
        return FlatGradient(own)
    flat = torch.empty_like(held.shard)
    views = held.bucket.spec.rest_views(flat)
    pairs = zip(held.shares, gradients, strict=True)
    copied = [(grad, views[share.index]) for share, grad in pairs if grad is not None]
    for gradient, view in copied:
        view.copy_(gradient)
    return FlatGradient(flat, copied)


def _own_memory(held: Held, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The buffer that the gradients are views of, if they are."""
    itemsize, dtype = held.shard.element_size(), held.shard.dtype
    found = [(grad, at) for at in held.solid if (grad := gradients[at]) is not None]
    some = [gradient for gradient, _ in found]
    if not some or not all(map(Tensor.is_contiguous, some)):
        return None
    offsets = [held.shares[at].start * itemsize for _, at in found]
    bases = set(map(sub, map(Tensor.data_ptr, some), offsets))
    if len(bases) > 1 or {gradient.dtype for gradient in some} != {dtype}:
        return None
    storage = some[0].untyped_storage()
    start = bases.pop() - storage.data_ptr()  # bytes
    if start < 0 or start + held.shard.nbytes > storage.nbytes():
        return None
    return some[0].as_strided(held.shard.shape, (1,), start // itemsize)
