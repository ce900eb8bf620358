"""The forward pass, as the hooks on modules tell it.

    pre-hook ─ enter ─▶ compute ─▶ hook ─ exit      (one frame per call)

The nodes that made what a call returned go to ``backward``, which autograd tells when it comes
back to them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from shardwise.comm.garbage import uncollected
from shardwise.config.precision import Precision
from shardwise.errors import RanksDisagree, ScheduleError
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.plan.schedule.events import Phase
from shardwise.plan.units.structure import as_group, has_forward, partial_roots
from shardwise.runtime.backward import Backward
from shardwise.runtime.compiling import hide_gradients
from shardwise.runtime.forward_calls import ForwardCall
from shardwise.runtime.kept import cast_around_kept, input_dtypes
from shardwise.runtime.pytrees import (
    cast,
    cast_where_needed,
    grad_fns,
    may_hide_tensors,
    tensors,
    tensors_in_objects,
)
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.structure_check import StructureCheck
from shardwise.torch_internals import (
    graph_task,
    is_transformed,
    keeps_parametrized,
    next_sequence_number,
    outside_transforms,
    sequence_number,
    skip_in_dynamo,
    storage_key,
)


@dataclass(slots=True)
class Frame:
    """A forward call that has begun and not ended."""

    module: nn.Module
    unit: str | None
    call: ForwardCall | None  # None: no gradients, or a recomputation of a call that has one
    inputs: set[Node]
    python: FrameType  # Python's frame, which is on a stack for as long as the call goes on
    handled: BaseException | None  # what the caller was handling already when it began
    listed: bool  # False: a recomputation, which no schedule lists


class Hooks:
    """Installs hooks on a model and turns what they see into cues for the runtime.

    Args:
        unit_names: the unit that a module's forward uses.
        precision: the dtypes of inputs and outputs.
        is_one_graph: the model is compiled whole, and a graph cannot hold the hooks of its parts.
    """

    def __init__(
        self,
        model: nn.Module,
        unit_names: Mapping[nn.Module, str],
        runtime: Runtime,
        precision: Precision,
        is_one_graph: bool,
    ) -> None:
        self.model, self._unit_names = model, unit_names
        self.runtime, self.precision = runtime, precision
        self.comm, self.before_write = runtime.comm, runtime.before_write
        self._root = runtime.units.get(unit_names.get(model, ""))
        own = [] if self._root is None else [p for b in self._root.buckets for p in b.params]
        self._partial_roots = set() if is_one_graph else partial_roots(model, unit_names, own)
        #: What the user's code calls: the model, or the parts of one that has no forward.
        self._outermost = frozenset((model,) if has_forward(model) else as_group(model))
        called = {*self._outermost, *unit_names, *self._partial_roots}
        self._input_dtypes = input_dtypes(model, called, precision)
        self.backward = Backward(runtime)
        self._frames: list[Frame] = []
        self._handles: list[Any] = []
        self.registered = StructureCheck(model)

    def install(self) -> None:
        self.registered.install()
        for module in dict.fromkeys((self.model, *self._unit_names, *self._partial_roots)):
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after, always_call=True),
            ]
        self._handles += cast_around_kept(self.model, self.precision)
        self.backward.install()
        for sharding in self._shardings():
            sharding.engine = weakref.ref(self)

    def remove(self) -> None:
        self.registered.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.backward.remove()
        for sharding in self._shardings():
            sharding.engine = lambda: None

    def _shardings(self) -> Iterator[Sharding]:
        params = (p for s in self.runtime.units.values() for b in s.buckets for p in b.params)
        return filter(None, map(sharding_of, params))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.registered.__reduce_ex__(protocol)

    # ---- what shards ask -------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Is a forward or backward pass under way? One that has stopped is not."""
        self._abandon_stopped()
        return bool(self._frames) or self.backward.running

    def rest(self) -> None:
        """Whole parameters meet shards: outside a pass, they are shards, too."""
        if not self.computing:
            self.runtime.end_step()

    def make_whole(self, unit: str) -> None:
        """A parameter is read outside its unit's call: it stays whole until the step is over."""
        phase = Phase.BACKWARD if self.backward.running else Phase.FORWARD
        with outside_transforms():
            self.runtime.serve(unit, phase, "read")
        self.runtime.facts.pinned.add(unit)

    def was_read(self, whole: Any, result: Any) -> list[Tensor]:
        """``result`` was computed from a ``whole`` parameter between passes: its views in it."""
        made = tensors(result)
        recorded = [t for t in made if torch.is_grad_enabled() and t.grad_fn is not None]
        for node in grad_fns(recorded, with_bases=True):
            node.register_prehook(partial(self._come_to, whole.sharding.unit))
        plain = [t for t in made if type(t) is Tensor and t.layout is torch.strided]
        return [t for t in plain if storage_key(t) == storage_key(whole)]

    def _come_to(self, unit: str, gradients: Any) -> None:
        self.backward.begin()
        self.make_whole(unit)

    def check_idle(self, operation: str) -> None:
        """Raises ``ScheduleError`` while a forward or backward pass is under way."""
        if self.computing:
            raise ScheduleError(
                f"{operation} in the middle of a step, while units are gathered and gradients are "
                "being reduced, and other ranks may be at another unit. Do it between steps: "
                "after backward(), or before the forward pass."
            )
        if self.backward.suspended:
            raise ScheduleError(
                f"{operation} inside full_params(), where every parameter is unsharded until the "
                "block ends. Do it after the block."
            )

    # ---- forward ---------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.backward.suspended:
            return None
        if self._frames and self._may_begin(module):
            self._abandon_stopped()
        unit = self._unit_names.get(module)
        if self._root is not None and module in self._partial_roots:
            unit = self._root.name
            if self.runtime.facts.forward[unit]:  # as usual, the model is being called
                return None
        return self._enter(module, unit, (args, kwargs), sys._getframe(1))

    def _may_begin(self, module: nn.Module) -> bool:
        """Might this be the first call of a pass, though others seem to be open?"""
        return module in self._outermost or self._frames[0].module not in self._outermost

    def _enter(self, module: nn.Module, unit: str | None, given: Any, python: FrameType) -> Any:
        recomputes = graph_task() != -1 and self.backward.running
        if not (self._frames or recomputes):
            self._begin(unit)
        call = self._expected(unit, recomputes)
        inputs = () if call is None else grad_fns(tensors(given))
        frame = Frame(module, unit, call, set(inputs), python, sys.exc_info()[1], not recomputes)
        self._frames.append(frame)
        if unit is not None:
            with outside_transforms():
                self.runtime.enter(unit, Phase.FORWARD, frame.listed)
        dtype = self._input_dtypes.get(module)
        return None if dtype is None else cast_where_needed(given, dtype)

    def _expected(self, unit: str | None, recomputes: bool) -> ForwardCall | None:
        """The call that begins, if the backward pass comes back to it.

        In a recomputation (activation checkpointing) only if the first call ran without gradients
        (the reentrant kind). Else autograd knows the first one, and the unit only has to be whole.
        """
        if not torch.is_grad_enabled() or is_transformed():
            return None
        if recomputes and (unit is None or self.backward.calls.expects(unit)):
            return None
        parent = self._frames[-1].call if self._frames else None
        return ForwardCall(unit, parent, next_sequence_number())

    def _begin(self, unit: str | None) -> None:
        with outside_transforms():
            self.backward.abandon_stopped()
            self.backward.known.clear()
            self.registered.check()
            if torch.is_grad_enabled():
                self.runtime.update_trained()
            hide_gradients(self.runtime)
            self.runtime.begin_forward(unit)

    def _abandon_stopped(self) -> None:
        """Forget calls that have ended without a hook: torch calls none after KeyboardInterrupt."""
        going_on = len(self._frames)
        while going_on and not _goes_on(self._frames[going_on - 1].python):
            going_on -= 1
        stopped = self._frames[going_on:]
        del self._frames[going_on:]
        if stopped and not going_on and stopped[0].listed:
            self.backward.abandon("a forward pass stopped before its end")
        for frame in reversed(stopped) if going_on else ():
            self._failed(frame)
        self.backward.abandon_stopped()

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
        self._expect_backward(frame, output)
        with outside_transforms():
            if frame.unit is not None:
                torch.clear_autocast_cache()  # else a later call's gradient comes through this one
                self.runtime.exit(frame.unit, Phase.FORWARD, frame.listed)
            if frame.listed and not self._frames:
                self.runtime.end_forward()
        dtype = self.precision.output_dtype
        return None if dtype is None or module not in self._outermost else cast(output, dtype)

    def _failed(self, frame: Frame) -> None:
        """The call raised. Early-stopped recomputations do so, and mean no harm."""
        if frame.listed and not self._frames:
            self.backward.abandon("a forward pass raised an exception")
        elif frame.unit is not None:  # the model may catch it and go on
            with suppress(RanksDisagree):  # what is raised already says that the group is dead
                self.runtime.exit(frame.unit, Phase.FORWARD, frame.listed)

    def _expect_backward(self, frame: Frame, output: Any) -> None:
        """Ask autograd to tell when it comes back; where it cannot, pin the unit.

        So does an output that is a view of a parameter, and a weight that torch keeps for later
        calls: the unit stays whole until the step ends.
        """
        shown = tensors(output)
        pins = frame.listed and frame.unit is not None and self._shows(frame.unit, shown)
        if frame.call is not None:
            nodes = grad_fns(shown, with_bases=True)
            if hides := output is None or may_hide_tensors(output):
                nodes += self._hidden_nodes(frame.call, output, nodes)
            if nodes := [node for node in nodes if node not in frame.inputs]:
                self.backward.expect(frame.call, nodes, frame.inputs)
            elif hides:
                self.backward.expect_parameters()
                pins = True
        elif is_transformed():
            self.backward.expect_parameters()
        if pins and frame.unit is not None:
            self.runtime.facts.pinned.add(frame.unit)

    def _hidden_nodes(self, call: ForwardCall, output: Any, shown: list[Node]) -> list[Node]:
        """Return the nodes, not ``shown``, of what the call has made and hides in attributes."""
        nodes = grad_fns(tensors_in_objects(output), with_bases=True)
        made = (node for node in nodes if sequence_number(node) >= call.first_node)
        return [node for node in made if node not in shown]

    def _shows(self, unit: str, shown: list[Tensor]) -> bool:
        if keeps_parametrized() or is_transformed():
            return True
        keys = {bucket.storage_key for bucket in self.runtime.units[unit].buckets}
        return not keys.isdisjoint(map(storage_key, shown))

    # ---- other methods ---------------------------------------------------------------------

    def unit_of(self, module: nn.Module) -> str | None:
        """The unit that ``module`` itself reads: its own, or that of a module around it."""
        if module in self._unit_names:
            return self._unit_names[module]
        inside = {self._unit_names[part] for part in module.modules() if part in self._unit_names}
        mine = {id(param) for param in module.parameters()}
        holders = (
            name
            for name, state in self.runtime.units.items()
            if name not in inside and any(id(p) in mine for b in state.buckets for p in b.params)
        )
        return next(holders, None)

    def call(
        self, module: nn.Module, unit: str | None, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a method of ``module`` as its ``forward`` is run: ``unit`` is whole inside."""
        if self._frames and self._may_begin(module):
            self._abandon_stopped()
        around = unit is not None and self.runtime.facts.forward[unit] > 0
        if around or self.backward.suspended or any(f.module is module for f in self._frames):
            return func(*args, **kwargs)
        args, kwargs = self._enter(module, unit, (args, kwargs), sys._getframe()) or (args, kwargs)
        try:
            output = func(*args, **kwargs)
        except BaseException:
            self._after(module, args, None)
            raise
        replaced = self._after(module, args, output)
        return output if replaced is None else replaced


def _goes_on(call: FrameType) -> bool:
    """Is this call on the stack of any thread?"""
    # Of this thread as a rule; the stacks of other threads change while they are read.
    if _is_on(sys._getframe(), call):
        return True
    with uncollected():
        return any(_is_on(stack, call) for stack in sys._current_frames().values())


def _is_on(stack: FrameType | None, call: FrameType) -> bool:
    while stack is not None and stack is not call:
        stack = stack.f_back
    return stack is call


skip_in_dynamo(Hooks._before, Hooks._after, Hooks._come_to)
