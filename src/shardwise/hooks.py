"""The forward pass, as modules' hooks tell it.

    pre-hook ─ enter ─▶ compute ─▶ hook ─ exit      (one frame per call)

What a call returned is looked at once, for the nodes by which ``backward`` will know it again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from shardwise.backward import Backward
from shardwise.blocks import as_group, has_forward, stacks
from shardwise.compiling import shield
from shardwise.errors import ScheduleError, ShardUseError
from shardwise.forward_calls import ForwardCall
from shardwise.refusals import transformed
from shardwise.registered import Registered
from shardwise.runtime import Runtime
from shardwise.schedule import Phase
from shardwise.sharding import Sharding, sharding_of
from shardwise.torch_internals import (
    graph_task,
    is_transformed,
    next_sequence_number,
    skip_in_dynamo,
    storage_key,
)
from shardwise.trees import cast, hides, makers, tensors

__all__ = ["Hooks"]


@dataclass(slots=True)
class Frame:
    """A forward call that has begun and not ended."""

    module: nn.Module
    unit: str | None
    call: ForwardCall | None  # None: no gradients, or a recomputation of a call that has one
    inputs: frozenset[Node]
    python_frame: FrameType  # on a stack for as long as the call goes on
    handled: BaseException | None  # what the caller was handling already when it began
    cued: bool = True  # False in a recomputation, which the schedule does not list
    resume: Any = None  # of the outermost frame: the cursor to go on with


class Hooks:
    """Installs hooks on a model and turns what they see into cues.

    Args:
        model: the root.
        brackets: the modules whose forward uses a unit, with the unit's name.
        runtime: who is told.
        casts: dtypes of the model's floating-point inputs and outputs (``None``: as they are).
    """

    def __init__(
        self,
        model: nn.Module,
        brackets: Mapping[nn.Module, str],
        runtime: Runtime,
        casts: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    ) -> None:
        self.model, self.brackets, self.runtime, self.casts = model, brackets, runtime, casts
        self._root = runtime.units.get(brackets.get(model, ""))
        own = [] if self._root is None else [p for b in self._root.buckets for p in b.params]
        self._stacks = stacks(model, brackets, own)
        #: What the user's code calls: the model, or the parts of one that has no forward.
        self._outermost = frozenset((model,) if has_forward(model) else as_group(model))
        self.backward = Backward(runtime)
        self._frames: list[Frame] = []
        self._handles: list[Any] = []
        members = [m for s in runtime.units.values() for b in s.buckets for m in b.members]
        self.registered = Registered(model, {a: m.param for m in members for a in m.aliases})

    def install(self) -> None:
        """Put every hook in place."""
        self.registered.install()
        for module in dict.fromkeys((self.model, *self.brackets, *self._stacks)):
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after, always_call=True),
            ]
        self.backward.install()
        for sharding in self._shardings():
            sharding.engine = weakref.ref(self)

    def remove(self) -> None:
        """Take every hook away again."""
        self.registered.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.backward.remove()
        for sharding in self._shardings():
            sharding.engine = None

    def _shardings(self) -> Iterator[Sharding]:
        params = (p for s in self.runtime.units.values() for b in s.buckets for p in b.params)
        return (found for param in params if (found := sharding_of(param)) is not None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardUseError(
            f"a module of the sharded {type(self.model).__name__} cannot be pickled, nor copied "
            "without the rest: it belongs to this rank's group. Save model.state_dict() (whole "
            "tensors) or sharded.local_state_dict() (shards); copy.deepcopy(model) of the whole "
            "model gives a plain copy."
        )

    # ---- what shards ask -------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Is a forward or backward pass under way? One that has stopped is not."""
        self._abandon_stopped()
        return bool(self._frames) or self.backward.running

    def make_whole(self, unit: str) -> None:
        """A parameter is read beside its unit's call: whole until the step is over."""
        phase = Phase.BACKWARD if self.backward.running else Phase.FORWARD
        self.runtime.serve(unit, phase, "read")
        self.runtime.facts.pinned.add(unit)

    def before_write(self, unit: str) -> None:
        """Shards of a unit are written next, at any time."""
        self.runtime.before_write(unit)

    def check_idle(self, asked: str) -> None:
        """Raises ``ScheduleError`` while a forward or backward pass is under way."""
        if self.computing:
            raise ScheduleError(
                f"{asked} in the middle of a step, while units are gathered and gradients are on "
                "their way, and other ranks may be at another unit. Do it between steps: after "
                "backward(), or before the forward pass."
            )
        if self.backward.suspended:
            raise ScheduleError(
                f"{asked} inside full_params(), where every parameter is whole already and will be "
                "a shard again at the end of the block. Do it after the block."
            )

    # ---- forward ---------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.backward.suspended:
            return None
        if self._frames and self._may_begin(module):
            self._abandon_stopped()
        unit = self.brackets.get(module)
        if self._root is not None and module in self._stacks:
            unit = self._root.name
            if self.runtime.facts.forward[self._root.name]:  # as usual, the model is being called
                return None
        return self._enter(module, unit, (args, kwargs), sys._getframe(1))

    def _may_begin(self, module: nn.Module) -> bool:
        """Might this be the first call of a pass, though others seem to be open?"""
        return module in self._outermost or self._frames[0].module not in self._outermost

    def _enter(self, module: nn.Module, unit: str | None, given: Any, call: FrameType) -> Any:
        if graph_task() != -1 and self.backward.running:
            self._recompute(self._frame(module, unit, given, call))
            return None
        resume = None if self._frames else self._begin(unit)
        frame = self._frame(module, unit, given, call)
        frame.resume = resume
        self._frames.append(frame)
        if unit is not None:
            self.runtime.enter(unit, Phase.FORWARD)
        return self._cast_inputs(module, given)

    def _begin(self, unit: str | None) -> Any:
        if is_transformed():
            raise transformed()
        self.backward.abandon_stopped()
        self.registered.check()
        if torch.is_grad_enabled():
            self.runtime.update_trained()
        shield(self.runtime)
        return self.runtime.begin_forward(unit)

    def _abandon_stopped(self) -> None:
        """Forget calls that have ended without telling us: torch tells of no KeyboardInterrupt."""
        going_on = len(self._frames)
        while going_on and not _goes_on(self._frames[going_on - 1].python_frame):
            going_on -= 1
        stopped = self._frames[going_on:]
        del self._frames[going_on:]
        if stopped and not going_on and stopped[0].cued:
            self.backward.abandon("a forward pass stopped before its end")
        for frame in reversed(stopped) if going_on else ():
            self._failed(frame)
        self.backward.abandon_stopped()

    def _frame(self, module: nn.Module, unit: str | None, given: Any, frame: FrameType) -> Frame:
        handled = sys.exc_info()[1]
        if not torch.is_grad_enabled():
            return Frame(module, unit, None, frozenset(), frame, handled)
        parent = self._frames[-1].call if self._frames else None
        call = ForwardCall(unit, parent, next_sequence_number())
        return Frame(module, unit, call, frozenset(makers(given)), frame, handled)

    def _recompute(self, frame: Frame) -> None:
        """A forward call inside the backward pass: activation checkpointing.

        A unit whose first call is remembered (non-reentrant) only has to be whole. One whose
        first call ran without gradients (reentrant) is met by autograd now for the first time.
        """
        frame.cued, unit = False, frame.unit
        if unit is None or self.backward.calls.expects(unit):
            frame.call = None
        self._frames.append(frame)
        if unit is not None:
            self.runtime.enter(unit, Phase.FORWARD, listed=False)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.backward.suspended or not self._frames:
            return None
        if self._frames[-1].module is not module:
            self._abandon_stopped()
            if not self._frames or self._frames[-1].module is not module:
                return None
        frame = self._frames.pop()
        if sys.exc_info()[1] is not frame.handled:
            self._failed(frame)
            return None
        if frame.unit is not None and frame.cued:
            self._pin(frame.unit, output)
        self._expect_backward(frame, output)
        if frame.unit is not None:
            self.runtime.exit(frame.unit, Phase.FORWARD, frame.cued)
        if frame.cued and not self._frames:
            self.runtime.end_forward(frame.resume)
        return self._cast_outputs(module, output)

    def _failed(self, frame: Frame) -> None:
        """The call raised. Early-stopped recomputations do so, and mean no harm."""
        if frame.cued and not self._frames:
            self.backward.abandon("a forward pass raised an exception")
        elif frame.unit is not None:  # the model may catch it and go on
            self.runtime.exit(frame.unit, Phase.FORWARD, frame.cued)

    def _pin(self, unit: str, output: Any) -> None:
        """An output that is a view of a parameter keeps the unit whole until the step ends."""
        homes = self.runtime.units[unit].homes
        if any(storage_key(t) in homes for t in tensors(output)):
            self.runtime.facts.pinned.add(unit)

    def _expect_backward(self, frame: Frame, output: Any) -> None:
        """Ask autograd to tell when it comes back through this call."""
        if frame.call is None:
            return
        nodes = [node for node in makers(output, with_bases=True) if node not in frame.inputs]
        if nodes:
            self.backward.expect(frame.call, nodes, frame.inputs)
        elif frame.unit is not None and hides(output):  # it stays whole until the step ends
            self.runtime.facts.pinned.add(frame.unit)

    # ---- other methods ---------------------------------------------------------------------

    def unit_of(self, module: nn.Module) -> str | None:
        """The unit that ``module`` itself reads: its own, or that of a module around it."""
        if module in self.brackets:
            return self.brackets[module]
        inside = {self.brackets[part] for part in module.modules() if part in self.brackets}
        mine = {id(param) for param in module.parameters()}
        holders = (
            name
            for name, state in self.runtime.units.items()
            if name not in inside and any(id(p) in mine for b in state.buckets for p in b.params)
        )
        return next(holders, None)

    def call(
        self,
        module: nn.Module,
        unit: str | None,
        method: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a method of ``module`` as its ``forward`` is run: ``unit`` is whole inside."""
        if self._frames and self._may_begin(module):
            self._abandon_stopped()
        around = unit is not None and self.runtime.facts.forward[unit] > 0
        if around or self.backward.suspended or any(f.module is module for f in self._frames):
            return method(*args, **kwargs)
        given = (args, kwargs)
        args, kwargs = self._enter(module, unit, given, sys._getframe()) or given
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after(module, args, None)
            raise
        replaced = self._after(module, args, output)
        return output if replaced is None else replaced

    # ---- casts at the model's border -------------------------------------------------------

    def _cast_inputs(self, module: nn.Module, given: Any) -> Any:
        if module not in self._outermost or self.casts[0] is None:
            return None
        return cast(given, self.casts[0])

    def _cast_outputs(self, module: nn.Module, output: Any) -> Any:
        if module not in self._outermost or self.casts[1] is None:
            return None
        return cast(output, self.casts[1])


def _goes_on(call: FrameType) -> bool:
    """Is this call on the stack of this thread, or else of another one?"""
    return _is_on(sys._getframe(1), call) or any(
        _is_on(stack, call) for stack in sys._current_frames().values()
    )


def _is_on(stack: FrameType | None, call: FrameType) -> bool:
    while stack is not None and stack is not call:
        stack = stack.f_back
    return stack is call


skip_in_dynamo(Hooks._before, Hooks._after)
