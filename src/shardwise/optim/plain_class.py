"""Parameters show their plain class while an optimizer steps, and are shards again afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.optim.blockwise import is_blockwise, make_state
from shardwise.torch_internals import hooks_behind, skip_in_dynamo

_OF_SHARDS: dict[type[Tensor], type[Tensor]] = {nn.Parameter: ShardedParameter, Tensor: ShardTensor}


class PlainClassDuringStep(dict[str, Any]):
    """Shows parameters as plain ``nn.Parameter`` while ``optimizer.step`` runs.

    torch reads attributes of a plain tensor fast, and fused kernels take it. It travels in the
    step's keyword arguments because torch calls no hook when a step raises.
    """

    params: Sequence[nn.Parameter] = ()
    tensors: Sequence[Tensor] = ()

    def show(self, params: Iterable[nn.Parameter]) -> None:
        """Give them, and gradients that the user has read, their plain class."""
        guarded: list[nn.Parameter] = [param for param in params if type(param) is ShardedParameter]
        for param in guarded:
            param.__class__ = nn.Parameter
        # Only gradients that the user has read have this class.
        marked = [grad for param in guarded if type(grad := param.grad) is ShardTensor]
        for gradient in marked:
            gradient.__class__ = Tensor  # type: ignore[assignment]
        self.tensors = [*self.tensors, *guarded, *marked]

    def hide(self) -> None:
        """Give them back the class of shards."""
        for tensor in self.tensors:  # which may be gathered by now
            tensor.__class__ = _OF_SHARDS.get(type(tensor), type(tensor))
        self.tensors = ()

    __del__ = hide

    def hiding(self, closure: Any) -> Any:
        """The ``closure`` of the step, in which they are shards."""

        def hidden() -> Any:
            self.hide()
            try:
                return closure()
            finally:
                self.show(self.params)

        return hidden if callable(closure) else closure


def _show(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Show plain parameters after the user's last hook: the optimizer's code runs next."""
    if not isinstance(kwargs, PlainClassDuringStep):
        return None
    kwargs.show(kwargs.params)
    if is_blockwise(optimizer):
        make_state(optimizer, kwargs.params)
    if "closure" in kwargs:
        kwargs["closure"] = kwargs.hiding(kwargs["closure"])
    return (*args[:1], *map(kwargs.hiding, args[1:])), kwargs


def _hide(_optimizer: Optimizer, _args: Any, kwargs: dict[str, Any]) -> None:
    """Show shards again before the user's first hook after the step."""
    if isinstance(kwargs, PlainClassDuringStep):
        kwargs.hide()


# Of each optimizer that stepped on shards, the handle of the first of these two hooks.
_shown: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def hook_around(optimizer: Optimizer) -> None:
    """Call ``_show`` as the last hook before the step, and ``_hide`` as the first one after it."""
    if optimizer not in _shown:
        _shown[optimizer] = optimizer.register_step_pre_hook(_show)
        after = optimizer.register_step_post_hook(_hide)
        hooks_behind(after).move_to_end(after.id, last=False)
    before = _shown[optimizer]
    hooks_behind(before).move_to_end(before.id)


skip_in_dynamo(_show, _hide)
