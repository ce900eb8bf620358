"""A parameter while its unit is whole, which tells its bucket before it is written.

Forward passes write parameters: a target that follows (MoCo), a scale that is clamped, an
embedding with ``max_norm``. What is written to a gathered parameter would be lost when its unit is
freed; and where all ranks of a host map one full bucket, each of them would write to it.

So while its unit is whole a parameter is of this class. The methods that write, and those that
hand its memory out (``data``, ``detach``), tell the bucket first. Every other operation sees a
plain parameter, since torch's own dispatch to subclasses is disabled, and costs nothing. Functions
that write without a method (``torch._foreach_add_``) change the parameter's version, which the
bucket looks at before the unit is freed. So does what was detached in a backward pass, where
``torch.utils.checkpoint`` detaches every parameter that it recomputes with, and only reads it.

Between passes a unit may still be whole, and a parameter be read that is freed when autograd comes
back to it, where each rank has its shard. So a read then tells the engine what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import torch_internals as internals
from shardwise.errors import ShardUseError
from shardwise.memory.shard_tensor.function_call import Call
from shardwise.memory.shard_tensor.use_errors import needs_full_tensor
from shardwise.memory.sharding import sharding_of

_BINARY = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITES_NOTHING = {"requires_grad_", "share_memory_"}


class GatheredParameter(nn.Parameter):
    """The class of a parameter while its unit is whole."""

    __torch_function__: Any = internals.NO_TORCH_FUNCTION

    @staticmethod
    def before_write() -> None:
        """A bucket sets its own; a copy of a gathered parameter belongs to no bucket."""

    @property
    def data(self) -> Tensor:
        """The whole values, without their history."""
        if not internals.read_by_compiled_code():
            self.before_write()
        return internals.get_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.before_write()
        internals.set_data(self, value)


class Uncalled(Tensor):
    """The class of a whole parameter's views between passes: the engine hears of what reads it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        call = Call(func, args, kwargs or {}, Uncalled)
        read = call.shards(call.tensors())
        with internals.disable_torch_function():
            if call.attribute not in ("", "T", "mT", "H", "mH", "real", "imag", "data"):
                return call.run()  # of no values
            params = [_parameter_of(given, call.name) for given in read]
        turn(read, CALLED)
        try:
            result = call.run()
        finally:
            turn(read, UNCALLED)
        with internals.disable_torch_function():
            for param in filter(sharding_of, params):  # a deep copy has none
                if (engine := param.sharding.engine()) is not None:
                    for view in engine.was_read(param, (result, call.written)):
                        _VIEWED[view], view.__class__ = ref(param), Uncalled
        return result


class UncalledParameter(Uncalled, GatheredParameter):
    """The class of a whole parameter between passes."""


_VIEWED: Any = WeakTensorKeyDictionary()  # views between passes → what they show, weakly


def _parameter_of(read: Any, reader: str) -> Any:
    """The parameter; an error if autograd could not come back to it, or it shows other memory."""
    param, key = _VIEWED.get(read, lambda: read)(), internals.storage_key
    is_shown = param is read or (isinstance(param, GatheredParameter) and key(param) == key(read))
    if sharding_of(param) is None and not is_shown:
        text = "a view of a parameter that is gone, or that unshard() moved: read it again."
        raise ShardUseError(f"{reader!r} of {text}")
    if not is_shown:
        raise needs_full_tensor(f"{reader} of a view that was read before", param)
    if internals.is_transformed() and sharding_of(param) is not None:
        raise needs_full_tensor(f"{reader} in a transform of torch.func", param)
    return param


def turn(tensors: Iterable[Tensor], classes: Mapping[type[Tensor], type[Tensor]]) -> None:
    """Give tensors of some ``classes`` others: a pass begins or ends, or a function is called."""
    for tensor in tensors:
        tensor.__class__ = classes.get(type(tensor), type(tensor))


CALLED: dict[type[Tensor], type[Tensor]] = {UncalledParameter: GatheredParameter, Uncalled: Tensor}
UNCALLED = {kind: of for of, kind in CALLED.items()}


def _checked(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def write(self: GatheredParameter, *args: Any, **kwargs: Any) -> Any:
        if name == "set_" and args and args[0] is self:  # by ``parametrize``, at each forward
            return self
        if name != "detach" or internals.graph_task() == -1:
            self.before_write()
        return method(self, *args, **kwargs)

    return write


def _writing() -> list[str]:
    """The names of the methods that write to their tensor, or hand its memory out."""
    named = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")}
    return [*named - _WRITES_NOTHING, *(f"__i{op}__" for op in _BINARY), "__setitem__", "detach"]


for _name in _writing():
    setattr(GatheredParameter, _name, _checked(_name))

internals.skip_in_dynamo(vars(Uncalled)["__torch_function__"].__func__)
