"""Where cues come from: hooks on modules, on autograd's nodes, and on parameters.

    forward    pre-hook ─ enter ─▶ compute ─▶ hook ─ exit      (one frame per call)
    backward   node that made the outputs ─ enter ─▶ gradients ─▶ node that made the inputs ─ exit
    gradient   a parameter's gradient is complete ─ collect

Hooks sit on autograd's *nodes*, not on tensors, and no node of our own is inserted: an output
that is changed in place keeps its maker in the graph, where a tensor hook would be lost or an
identity function would forbid the change.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from shardwise.blocks import stacks
from shardwise.buffers import Bucket
from shardwise.errors import ScheduleError, ShardUseError
from shardwise.guard import get_grad, handed_out, set_grad
from shardwise.leaves import is_handed_out, on_gradient
from shardwise.runtime import Runtime
from shardwise.schedule import Op, Phase
from shardwise.trees import cast, hides, makers, tensors
from shardwise.unit_state import UnitState
from shardwise.visits import Visit

__all__ = ["Hooks"]


@dataclass(slots=True)
class Frame:
    """A forward call that has begun and not ended."""

    module: nn.Module
    unit: str | None
    visit: Visit | None  # None: no gradients, or a recomputation whose first call is remembered
    inputs: frozenset[Node]
    cued: bool  # False in a recomputation, which the schedule does not list
    handled: BaseException | None  # what the caller was handling already when it began
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
        self.suspended = False  # full_params(): everything is whole, nothing to do
        self._frames: list[Frame] = []
        # By the node that made an input, inner calls first: a set's order would differ by rank.
        self._ending: dict[int, list[weakref.ref[Visit]]] = {}
        self._backward: weakref.ref[_Token] | None = None
        self._handles: list[Any] = []
        self._places: list[tuple[UnitState, Bucket, int]] = []
        with torch.inference_mode(False):  # shard() may be called in it
            self._anywhere = get_gradient_edge(torch.zeros(0, requires_grad=True)).node

    def install(self) -> None:
        """Put every hook in place."""
        for module in dict.fromkeys((self.model, *self.brackets, *self._stacks)):
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after, always_call=True),
            ]
        self._places = [
            (state, bucket, index)
            for state in self.runtime.units.values()
            for bucket in state.buckets
            if bucket.dtypes.stored.is_floating_point or bucket.trainable
            for index in range(len(bucket.params))
        ]
        for number, (_, bucket, index) in enumerate(self._places):
            # Weak: the garbage collector does not see what this kind of hook holds.
            hook = partial(_arrived, weakref.ref(self), number)
            self._handles.append(on_gradient(bucket.params[index], hook))

    def remove(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardUseError(
            f"a module of the sharded {type(self.model).__name__} cannot be pickled, nor copied "
            "without the rest: it belongs to this rank's group. Save model.state_dict() (whole "
            "tensors) or sharded.local_state_dict() (shards); copy.deepcopy(model) of the whole "
            "model gives a plain copy."
        )

    def check_idle(self, asked: str) -> None:
        """Raises ``ScheduleError`` while a forward or backward pass is under way."""
        if self._frames or self._in_backward():
            raise ScheduleError(
                f"{asked} in the middle of a step, while units are gathered and gradients are on "
                "their way, and other ranks may be at another unit. Do it between steps: after "
                "backward(), or before the forward pass."
            )
        if self.suspended:
            raise ScheduleError(
                f"{asked} inside full_params(), where every parameter is whole already and will be "
                "a shard again at the end of the block. Do it after the block."
            )
        if self._backward is not None:
            self._backward = None
            self.runtime.abandon("a backward pass stopped before its end")

    # ---- forward ---------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.suspended:
            return None
        unit = self.brackets.get(module)
        if self._root is not None and module in self._stacks:
            unit = self._root.name
            if self._root.depth:  # as usual: the model around it is being called
                return None
        if torch._C._current_graph_task_id() != -1 and self._in_backward():
            self._recompute(module, unit, (args, kwargs))
            return None
        outermost = not self._frames or self._is_abandoned(module)
        resume = self._begin(unit) if outermost else None
        frame = self._frame(module, unit, (args, kwargs), cued=True)
        frame.resume = resume
        self._frames.append(frame)
        if unit is not None:
            self.runtime.units[unit].depth += 1
            self.runtime.cue(Op.ENTER, unit, Phase.FORWARD)
        return self._cast_inputs(module, args, kwargs)

    def _begin(self, unit: str | None) -> Any:
        if self._backward is not None and self._backward() is None:
            self._backward = None
            self.runtime.abandon("a backward pass stopped before its end")
        if torch.is_grad_enabled():
            self.runtime.take_up_trained()
        if not self.runtime.awaits_backward():
            self._ending.clear()
        return self.runtime.begin(unit)

    def _is_abandoned(self, module: nn.Module) -> bool:
        """The model is called while it is being called: that call ended without telling us."""
        if module is not self.model or all(frame.module is not module for frame in self._frames):
            return False
        self._frames.clear()
        self.runtime.abandon("a forward pass stopped before its end")
        return True

    def _frame(self, module: nn.Module, unit: str | None, called: Any, cued: bool) -> Frame:
        handled = sys.exc_info()[1]
        if not torch.is_grad_enabled():
            return Frame(module, unit, None, frozenset(), cued, handled)
        parent = self._frames[-1].visit if self._frames else None
        visit = Visit(unit, parent, torch._C._autograd._get_sequence_nr())
        return Frame(module, unit, visit, frozenset(makers(called)), cued, handled)

    def _recompute(self, module: nn.Module, unit: str | None, called: Any) -> None:
        """A forward call inside the backward pass: activation checkpointing.

        A unit whose first call is remembered (non-reentrant) only has to be whole. One whose
        first call ran without gradients (reentrant) is met by autograd now for the first time.
        """
        remembered = unit is None or self.runtime.units[unit].visits.live()
        frame = self._frame(module, unit, called, cued=False)
        if remembered:
            frame.visit = None
        self._frames.append(frame)
        if unit is not None:
            self.runtime.units[unit].depth += 1
            self.runtime.serve(unit, Phase.BACKWARD, "recomputed")

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.suspended or not self._frames or self._frames[-1].module is not module:
            return None
        frame = self._frames.pop()
        failed = sys.exc_info()[1] is not frame.handled
        if frame.unit is not None:
            self.runtime.units[frame.unit].depth -= 1
        if failed:
            self._failed(frame)
            return None
        if frame.unit is not None and frame.cued:
            self._pin(frame.unit, output)
            self._meet(frame, output)
            self.runtime.cue(Op.EXIT, frame.unit, Phase.FORWARD)
        else:
            self._meet(frame, output)
        if frame.cued and not self._frames:
            self.runtime.resume(frame.resume)
        return self._cast_outputs(module, output)

    def _failed(self, frame: Frame) -> None:
        """The call raised. Early-stopped recomputations do so, and mean no harm."""
        if frame.cued and not self._frames:
            self.runtime.abandon("a forward pass raised an exception")
        elif frame.cued and frame.unit is not None:  # the model may catch it and go on
            self.runtime.cue(Op.EXIT, frame.unit, Phase.FORWARD)

    def _pin(self, unit: str, output: Any) -> None:
        """An output that is a view of a parameter keeps the unit whole until the step ends."""
        state = self.runtime.units[unit]
        if any(t.untyped_storage()._cdata in state.homes for t in tensors(output)):
            state.pinned = True

    def _meet(self, frame: Frame, output: Any) -> None:
        """Ask autograd to tell us when it comes back through this call."""
        if frame.visit is None:
            return
        nodes = [node for node in makers(output, with_bases=True) if node not in frame.inputs]
        if not nodes:
            if frame.unit is not None and hides(output):  # it stays whole until the step ends
                self.runtime.units[frame.unit].pinned = True
            return
        visit = frame.visit
        if visit.parent is not None:
            visit.parent.encloses = True
        if frame.unit is not None:
            self.runtime.units[frame.unit].visits.add(visit)
        for node in nodes:
            node.register_prehook(partial(self._enter_backward, visit, node._sequence_nr()))
        visit.bounded = bool(frame.inputs)
        for node in frame.inputs:
            if "AccumulateGrad" in node.name():
                # A leaf's gradient is due as early as those of the parameters, in any order.
                node.register_prehook(partial(self._leave_when_complete, visit))
                continue
            node.register_prehook(partial(self._leave_backward, visit))
            self._ending.setdefault(node._sequence_nr(), []).append(weakref.ref(visit))

    # ---- backward --------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        return self._backward is not None and self._backward() is not None

    def _begin_backward(self) -> None:
        """The first we see of a backward pass.

        Its end calls us back. An exception does not, but then nobody holds the token any more,
        which ``_begin`` notices.
        """
        if self._in_backward():
            return
        if self._backward is not None:
            self.runtime.abandon("a backward pass stopped before its end")
        if (reason := self._freed() or self._handed_out()) is not None:
            self.runtime.abandon("a backward pass was refused")
            raise reason
        token = _Token()
        self._backward = weakref.ref(token)
        self.runtime.begin_backward()
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._end_backward, token))

    def _freed(self) -> ScheduleError | None:
        """With create_graph=True, autograd records the backward pass, in grad mode."""
        buckets = [bucket for state in self.runtime.units.values() for bucket in state.buckets]
        if not torch.is_grad_enabled() or all(bucket.stays_whole for bucket in buckets):
            return None
        return ScheduleError(
            "create_graph=True on a sharded model: the backward pass through this graph would "
            "read parameters that are freed by then. For a gradient penalty use "
            'strategy="no_shard", which keeps parameters whole; or compute inside '
            "`with sharded.full_params():`, where gradients are not averaged over the ranks."
        )

    def _handed_out(self) -> ShardUseError | None:
        """torch.autograd.grad hands a parameter's gradient out instead of accumulating it."""
        if self.runtime.comm.size == 1 or torch._C._will_engine_execute_node(self._anywhere):
            return None  # backward() without inputs= executes every node, also those of others
        names = (
            bucket.members[index].name
            for _, bucket, index in self._places
            if bucket.params[index].requires_grad and is_handed_out(bucket.params[index])
        )
        name = next(names, None)
        return None if name is None else handed_out(name)

    def _end_backward(self, token: _Token) -> None:
        self._backward = None
        self._ending.clear()
        self.runtime.end_backward()

    def _enter_backward(self, visit: Visit, node: int, gradients: Any) -> None:
        """The gradients of a call's outputs are there.

        Often one node made the output of one call and the input of the next: the next has ended,
        and autograd would tell us so only after this.
        """
        self._begin_backward()
        for ref in self._ending.pop(node, ()):
            if (ended := ref()) is not None:
                self.runtime.leave_backward(ended)
        self.runtime.leave_after(node)
        chain = [visit]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        for around in reversed(chain):
            self.runtime.enter_backward(around)

    def _leave_backward(self, visit: Visit, gradients: Any) -> None:
        if self._in_backward():
            self.runtime.leave_backward(visit)

    def _leave_when_complete(self, visit: Visit, gradients: Any) -> None:
        if self._in_backward():
            self.runtime.end_visit(visit)

    def _collect(self, number: int, param: Tensor) -> None:
        state, bucket, index = self._places[number]
        if self.suspended:
            param.grad = None
            raise ScheduleError(
                "backward() inside full_params() would leave whole gradients on every rank. Train "
                "outside the block; full_params() is for reading, writing and generating."
            )
        gradient = get_grad(param)
        if gradient is None:  # a function whose backward gave None for its parameter
            return
        if gradient.requires_grad:
            raise ScheduleError(
                f"the gradient of {bucket.members[index].name!r} carries a graph "
                "(create_graph=True): a second backward through it would need parameters and "
                "gradients that are freed by then. Take the inner derivative with "
                "torch.autograd.grad, inside `with sharded.full_params():`."
            )
        # Taken first: what the shards have when a backward pass begins is set aside.
        set_grad(param, None)
        if self._backward is None or self._backward() is None:
            self._begin_backward()
        self.runtime.collect(state, bucket, index, gradient)

    # ---- casts at the model's border -------------------------------------------------------

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.model or self.casts[0] is None:
            return None
        return cast((args, kwargs), self.casts[0])

    def _cast_outputs(self, module: nn.Module, output: Any) -> Any:
        if module is not self.model or self.casts[1] is None:
            return None
        return cast(output, self.casts[1])


def _arrived(hooks: weakref.ref[Hooks], number: int, param: Tensor) -> None:
    if (alive := hooks()) is not None:
        alive._collect(number, param)


class _Token:
    """Held by autograd's queue of callbacks alone: it dies with the backward pass."""

    __slots__ = ("__weakref__",)
