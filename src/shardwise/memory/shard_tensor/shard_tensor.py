"""A tensor subclass for one rank's shard of a parameter, a gradient, or a moving average.

A plain tensor of a shard would return one rank's numbers for ``norm()``, ``isfinite().all()`` or
``histc()``, and the ranks would silently diverge. So reads of a sharded parameter, and all
elementwise results, have this class. It costs nothing otherwise: a gradient gets the class when it
is read (see ``sharded_parameter``), and an optimizer sees plain tensors (``plain_class``).

Functions on shards:
- Metadata and elementwise functions of tensors with the same sharding run on this rank and return
  a shard.
- A reduction of all elements to one number returns the global number on every rank, by a small
  collective.
- Any other function works in a forward or backward pass of the model: parameters are gathered for
  the rest of the step, as if their unit were called, and other shards are gathered. Outside a pass
  it raises on every rank, with one exception: an elementwise function with a plain tensor of the
  *full* shape is correct on a rank that has all elements. The others raise, which ends the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from shardwise.errors import ShardUseError
from shardwise.memory.shard_tensor.function_call import Call
from shardwise.memory.shard_tensor.torch_functions import dispatch, gather_arguments
from shardwise.memory.shard_tensor.use_errors import copied_shard
from shardwise.memory.sharding import Sharding
from shardwise.torch_internals import disable_torch_function, skip_in_dynamo, take_in_lists


class ShardTensor(Tensor):
    """One rank's shard of a tensor that has the shape of a parameter."""

    sharding: Sharding  # of the parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with disable_torch_function():
            call = Call(func, args, kwargs or {}, ShardTensor)
            result = dispatch(call)
            if not isinstance(result, ShardUseError):
                return result
            args, kwargs = gather_arguments(call, result)
        return func(*args, **kwargs)

    def to_local(self) -> Tensor:
        """This rank's shard as a plain tensor in the same memory."""
        with disable_torch_function():
            return self.detach()

    def full_tensor(self) -> Tensor:
        """The full tensor, plain and detached, in new memory on every rank. A collective."""
        with disable_torch_function():
            return self.sharding.whole(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with disable_torch_function():
            copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            copied.sharding = self.sharding  # type: ignore[attr-defined]
            copied.__class__ = ShardTensor
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copied_shard(self, "pickling")


take_in_lists(ShardTensor)  # so torch's clip_grad_norm_ needs one collective, and not one for each
skip_in_dynamo(vars(ShardTensor)["__torch_function__"].__func__)
