"""One rank's part of a value that is shaped like a parameter: a gradient, a moving average.

A plain tensor that holds a part of a gradient answers ``norm()``, ``isfinite().all()`` or
``histc()`` with one rank's numbers, silently, and the ranks drift apart. So what is read of a
parameter at rest is of this class, and so is every elementwise result of it. It costs nothing
where nobody reads: a gradient gets its class when it is read (see ``guard``), and an optimizer
sees plain tensors (see ``optim.optimizer_hooks``).

A function on shards
- that asks for metadata, or treats each element by itself among tensors that are cut alike, is
  carried out on this rank, and what it gives is a shard again. A shard that is cut otherwise is
  gathered first, and cut like the others;
- that reduces all elements to one number gives every rank the global one, by a small collective;
- that needs anything else is served in a forward or backward pass of the model: there parameters
  are made whole for the rest of the step, as if their unit were called, and other shards are
  gathered. Outside it is refused, on every rank alike, with one exception. Elementwise, with a
  plain tensor of the *whole* shape, a rank that happens to hold all elements computes what was
  meant. The others raise, and their error ends the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from shardwise.answers import answer, made_whole
from shardwise.calls import Call
from shardwise.errors import ShardUseError
from shardwise.refusals import lost
from shardwise.sharding import Sharding
from shardwise.torch_internals import disable_torch_function

__all__ = ["ShardTensor"]


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
        with disable_torch_function():
            call = Call(func, args, kwargs or {}, ShardTensor)
            result = answer(call)
            if not isinstance(result, ShardUseError):
                return result
            args, kwargs = made_whole(call, result)
        return func(*args, **kwargs)

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor in the same memory, for whatever purpose."""
        with disable_torch_function():
            return self.detach()

    def full_tensor(self) -> Tensor:
        """The whole, plain and detached, in new memory on every rank. A collective."""
        with disable_torch_function():
            return self.sharding.whole(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with disable_torch_function():
            copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            copied.sharding = self.sharding  # type: ignore[attr-defined]
            copied.__class__ = ShardTensor
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise lost(self, "pickling")
