"""Parameters at rest that show their plain class while an optimizer steps.

Of a plain tensor torch reads attributes fast, and fused kernels take it. torch calls no hook after
a step that raised; so what is shown is held by the arguments of that step alone, goes with them,
and is guarded again, however the step ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.guard import ShardedParameter
from shardwise.shard_tensor import ShardTensor

__all__ = ["Shown"]


class Shown(dict[str, Any]):
    """The keyword arguments of a step, and the tensors that are plain for as long as they exist."""

    tensors: Sequence[Tensor] = ()

    def show(self, params: Iterable[nn.Parameter]) -> None:
        """Show the class that they, and those of their gradients that the user has read, have."""
        guarded: list[nn.Parameter] = [param for param in params if type(param) is ShardedParameter]
        for param in guarded:
            param.__class__ = nn.Parameter
        # Of a plain parameter: what the user has read is marked, and no other is.
        marked = [grad for param in guarded if type(grad := param.grad) is ShardTensor]
        for gradient in marked:
            gradient.__class__ = Tensor  # type: ignore[assignment]
        self.tensors = [*self.tensors, *guarded, *marked]

    def __del__(self) -> None:
        for tensor in self.tensors:
            if type(tensor) is nn.Parameter:  # and not gathered by now
                tensor.__class__ = ShardedParameter
            elif type(tensor) is Tensor:
                tensor.__class__ = ShardTensor
