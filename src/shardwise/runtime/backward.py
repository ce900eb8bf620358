"""The backward pass, as autograd tells it: its begin and end, the nodes it comes to, gradients.

``forward_calls`` makes of nodes and gradients which unit's backward pass begins or has ended, and
has a drawing of each hard case. They call the runtime: begin, enter, collect, exit, end.

Hooks sit on autograd's *nodes*, not on tensors, and no node of our own is inserted. An output
that is changed in place keeps the node that made it in the graph; a hook on the tensor would be
lost, and an identity function would forbid the change.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardwise.errors import ScheduleError, ShardUseError
from shardwise.memory.grad_hooks import Arrivals, is_handed_out, on_gradient
from shardwise.memory.parameters import Bucket, State
from shardwise.memory.shard_tensor.use_errors import autograd_grad_called
from shardwise.plan.schedule.events import Phase
from shardwise.runtime.forward_calls import ForwardCall, ForwardCalls
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import UnitState
from shardwise.torch_internals import (
    disable_torch_function,
    get_grad,
    graph_task,
    identity,
    is_accumulate_grad,
    keeps_graph,
    queue_callback,
    sequence_number,
    set_grad,
    skip_in_dynamo,
)

IN_FULL_PARAMS = (
    "backward() inside full_params() would leave unsharded gradients on every rank. "
    "Train outside the block; full_params() is for reading, writing and generating."
)
AFTER_UNSHARD = (
    "backward() of a forward pass from before unshard() or relayout() would read parameters that "
    "are gone. Call the model again."
)


class Backward:
    """Turns what autograd does into cues for the runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.suspended = False  # full_params(): everything is whole, nothing to do
        self.calls = ForwardCalls(
            partial(runtime.enter, phase=Phase.BACKWARD),
            partial(runtime.exit, phase=Phase.BACKWARD),
        )
        self.known = set[object]()  # nodes at which calls of this forward pass begin
        self._installed = False
        self._begun = False  # a backward pass has begun, and its end was not seen
        self._token: weakref.ref[_Token] | None = None
        self._handles: list[Any] = []
        self._of_users: list[Mapping[int, Any]] = []  # hooks on gradients, of each place
        self._handles_before: list[Any] = []  # of hooks that are called before gradients are added
        self._places: dict[int, tuple[UnitState, Bucket, int]] = {}  # by ``id`` of the parameter

    def install(self) -> None:
        self._installed = True
        # Weak: the garbage collector does not see what this kind of hook holds.
        hook = partial(_arrived, weakref.ref(self))
        pairs = [(state, b) for state in self.runtime.units.values() for b in state.buckets]
        for state, bucket in pairs:
            arrivals = bucket.gradients.arrivals
            arrivals.tell = hook
            may_train = bucket.dtypes.stored.is_floating_point or bucket.trainable
            for index, param in enumerate(bucket.params if may_train else ()):
                self._places[id(param)] = state, bucket, index
                handle, of_users = on_gradient(param, arrivals if index in arrivals.small else hook)
                self._handles.append(handle)
                self._of_users.append(of_users)

    def remove(self) -> None:
        self._installed = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._of_users.clear()
        self._hook_before(False)
        self._places.clear()

    # ---- begin and end ---------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Is a backward pass under way?"""
        return self._token is not None and self._token() is not None

    def abandon(self, why: str, drops: bool = False) -> None:
        """Forget a pass that stopped; ``drops``: and all that was collected and not reduced."""
        self.calls.forget()
        self.runtime.abandon(why, drops)

    def abandon_stopped(self) -> None:
        """Forget a backward pass that an exception has ended."""
        if self._begun and not (self.running and graph_task() != -1):  # a traceback may hold it
            self._begun, self._token = False, None
            self.abandon("a backward pass stopped before its end", drops=True)

    def begin(self) -> None:
        """Autograd has come to the first node or gradient of a backward pass.

        The engine of autograd calls ``_end`` after the last. After an exception nobody holds the
        token any more.
        """
        if self.running:
            return
        if self.suspended or not self._installed:
            raise ScheduleError(IN_FULL_PARAMS if self.suspended else AFTER_UNSHARD)
        self.abandon_stopped()
        if (reason := self._handed_out()) is not None:
            self.abandon("a backward pass was refused")
            raise reason
        self._begun = True
        recorded = torch.is_grad_enabled()  # by create_graph=True
        self.runtime.begin_backward(recorded)
        token = _Token()
        self._token = weakref.ref(token, self._stopped)
        queue_callback(partial(self._end, token, recorded or keeps_graph()))

    def _end(self, token: _Token, keeps_graph: bool) -> None:
        self._token = None  # the traceback of an exception would hold the token
        self.calls.leave_all(tuple(self.runtime.units)[::-1])
        self.runtime.end_backward(keeps_graph)
        self._begun = False
        self._hook_before(self.runtime.facts.keeps_graph)
        if self.runtime.facts.reduces and any(self._of_users):
            self._call_users_hooks()

    def _call_users_hooks(self) -> None:
        """``register_post_accumulate_grad_hook``: every shard has its mean gradient now.

        The step is over, so an optimizer may step on the parameter and drop its gradient.
        """
        used = self.runtime.trained.used
        for (_, bucket, index), hooks in zip(self._places.values(), self._of_users, strict=True):
            if hooks and bucket in used and used[bucket][index]:
                for hook in tuple(hooks.values()):
                    hook(bucket.params[index])

    def expect_parameters(self) -> None:
        """A backward pass may come to a parameter before it comes to a node that is known."""
        if not self._handles_before:
            self._hook_before(True)

    def _hook_before(self, hooks: bool) -> None:
        """Hear of gradients before they are added, or no longer; until the next pass has ended.

        A pass through a recorded graph comes to parameters before it comes to a unit.
        """
        for handle in self._handles_before:
            handle.remove()
        places = self._places.values() if hooks else ()
        params = [bucket.params[index] for _, bucket, index in places]
        with disable_torch_function():
            self._handles_before = [
                param.register_hook(partial(_comes, weakref.ref(self)))
                for param in params
                if param.requires_grad
            ]

    def _stopped(self, token: weakref.ref[_Token]) -> None:
        """An exception has ended a backward pass. Not all can be done now: it may be Ctrl-C."""
        if token is self._token:
            self.runtime.show_shards()

    def _handed_out(self) -> ShardUseError | None:
        """The error if torch.autograd.grad returns a parameter's gradient instead of adding it."""
        # For a shard at rest it is refused where it is called.
        whole = (bucket for bucket in self.runtime.trained.buckets if bucket.is_whole)
        members = (member for b in whole for member in b.members if member.param.requires_grad)
        for member in members:
            if (answer := is_handed_out(member.param)) is not None:
                return autograd_grad_called(member.name) if answer else None
        return None

    # ---- calls -----------------------------------------------------------------------------

    def expect(
        self, call: ForwardCall, outputs: Collection[Node], inputs: Collection[Node]
    ) -> None:
        """Ask autograd to tell when it comes back through a forward call, which has ended.

        Args:
            outputs: the nodes that made what it returned, but for those of its inputs.
            inputs: the nodes that made what it was given.
        """
        self.calls.expect(call)
        for node in outputs:
            made = identity(node)
            node.register_prehook(partial(self._come_to, call, made, sequence_number(node)))
            self.known.add(made)
        call.end_is_seen = bool(inputs)
        for node in inputs:
            if is_accumulate_grad(node):
                # A leaf's gradient is due as early as those of the parameters, in any order.
                node.register_prehook(partial(self._leave_when_complete, call))
                continue
            made = identity(node)
            call.input_nodes.add(made)
            if made not in self.known:  # else ``come_to`` leaves this call there
                node.register_prehook(partial(self._leave, call))

    def _come_to(self, call: ForwardCall, node: object, number: int, gradients: Any) -> None:
        if self._token is None or self._token() is None:
            self.begin()
        self.calls.come_to(call, node, number)

    def _leave(self, call: ForwardCall, gradients: Any) -> None:
        if self.running:
            self.calls.leave(call)

    def _leave_when_complete(self, call: ForwardCall, gradients: Any) -> None:
        if self.running:
            complete = call.unit is None or self.runtime.units[call.unit].complete
            self.calls.inputs_complete(call, complete)

    # ---- gradients -------------------------------------------------------------------------

    def _refuse(self, name: str, param: Tensor) -> ScheduleError:
        set_grad(param, None)
        if self.suspended:
            return ScheduleError(IN_FULL_PARAMS)
        return ScheduleError(
            f"the gradient of {name!r} carries a graph (create_graph=True), which averaging over "
            "the ranks would lose. A derivative with respect to inputs is taken with "
            "torch.autograd.grad(loss, inputs, create_graph=True); one with respect to parameters "
            "inside `with sharded.full_params():`."
        )


def _arrived(reference: weakref.ref[Backward], param: Tensor) -> None:
    """A gradient was added. For each parameter in each step, so it is one function."""
    backward, gradient = reference(), get_grad(param)
    if backward is None or gradient is None:  # a function gave None for its parameter
        return
    state, bucket, index = backward._places[id(param)]
    if backward.suspended or gradient.requires_grad:
        raise backward._refuse(bucket.members[index].name, param)
    running = backward._token is not None and backward._token() is not None
    # Taken first: what the shards have when a backward pass begins is set aside.
    if running or not bucket.gradients.was_added_to(index, gradient):
        set_grad(param, None)
    runtime, facts = backward.runtime, backward.runtime.facts
    if not running:
        runtime.expect_late(state, bucket, index)  # before the pass gathers what it began at
        backward.begin()
    if bucket.state is not State.READY or state.name in facts.reducing:
        runtime.expect_late(state, bucket, index)
    if len(arrivals := bucket.gradients.arrivals) == arrivals.due:
        bucket.gradients.collect_arrivals()
    if bucket.gradients.collect(index, gradient, not facts.reduces) and runtime.is_complete(state):
        backward.calls.parameters_complete(state.name, state.wholly_trained)


def _comes(backward: weakref.ref[Backward], _: Tensor) -> None:
    if (alive := backward()) is not None:
        alive.begin()


class _Token:
    """Held by autograd's queue of callbacks alone: it dies with the backward pass."""

    __slots__ = ("__weakref__",)


skip_in_dynamo(Backward._come_to, Backward._leave, Backward._leave_when_complete, Backward._end)
skip_in_dynamo(_arrived, _comes, Arrivals.__call__)
