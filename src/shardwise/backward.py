"""The backward pass, as autograd tells it: where it is, and which gradients are there.

    node that made a call's outputs ─ enter ─▶ gradients ─▶ node that made its inputs ─ exit
    a parameter's gradient is complete ─ collect

Hooks sit on autograd's *nodes*, not on tensors, and no node of our own is inserted: an output
that is changed in place keeps its maker in the graph, where a tensor hook would be lost or an
identity function would forbid the change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardwise.buffers import Bucket
from shardwise.errors import ScheduleError, ShardUseError
from shardwise.leaves import is_handed_out, on_gradient
from shardwise.refusals import handed_out
from shardwise.runtime import Runtime
from shardwise.torch_internals import (
    disable_torch_function,
    get_grad,
    graph_task,
    is_accumulate_grad,
    keeps_graph,
    queue_callback,
    sequence_number,
    set_grad,
    skip_in_dynamo,
)
from shardwise.unit_state import UnitState
from shardwise.visits import Visit

__all__ = ["Backward"]


class Backward:
    """Turns what autograd does into cues.

    Args:
        runtime: who is told.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.suspended = False  # full_params(): everything is whole, nothing to do
        # By the node that made an input, inner calls first: a set's order would differ by rank.
        self._ending: dict[int, list[weakref.ref[Visit]]] = {}
        self._open = False  # a backward pass has begun, and its end was not seen
        self._kept = False  # is the graph of this backward pass there for another one?
        self._token: weakref.ref[_Token] | None = None
        self._handles: list[Any] = []
        self._early: list[Any] = []
        self._places: list[tuple[UnitState, Bucket, int]] = []

    def install(self) -> None:
        """Put the parameters' hooks in place."""
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
        """Take the parameters' hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._look_out(False)

    # ---- begin and end ---------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Is a backward pass under way?"""
        return self._token is not None and self._token() is not None

    def abandon_stopped(self) -> None:
        """Forget a backward pass that an exception has ended."""
        if self._open and not (self.running and graph_task() >= 0):  # a traceback may hold it
            self._open, self._token = False, None
            self.runtime.drop_gradients("a backward pass stopped before its end")

    def forget_calls(self) -> None:
        """No graph exists any more through which a backward pass would come."""
        self._ending.clear()

    def _begin(self) -> None:
        """The first we see of a backward pass.

        Its end calls us back. After an exception nobody holds the token any more.
        """
        if self.running:
            return
        self.abandon_stopped()
        if (reason := self._handed_out()) is not None:
            self.runtime.abandon("a backward pass was refused")
            raise reason
        self._open = True
        recorded = torch.is_grad_enabled()  # by create_graph=True
        self._kept = recorded or keeps_graph()
        self.runtime.begin_backward(recorded)
        token = _Token()
        self._token = weakref.ref(token, self._stopped)
        queue_callback(partial(self._end, token))

    def _end(self, token: _Token) -> None:
        self._token = None  # the traceback of an exception would hold the token
        self._ending.clear()
        self.runtime.end_backward(self._kept)
        self._open = False
        self._look_out(self.runtime.recorded)

    def _look_out(self, recorded: bool) -> None:
        """A pass through a recorded graph comes to parameters first, before it adds to them."""
        for handle in self._early:
            handle.remove()
        places = self._places if recorded else ()
        params = [bucket.params[index] for _, bucket, index in places]
        with disable_torch_function():
            self._early = [
                param.register_hook(partial(_met, weakref.ref(self)))
                for param in params
                if param.requires_grad
            ]

    def _stopped(self, token: weakref.ref[_Token]) -> None:
        """An exception has ended a backward pass. Not all can be done now: it may be Ctrl-C."""
        for state in self.runtime.units.values() if token is self._token else ():
            state.show_shards()

    def _handed_out(self) -> ShardUseError | None:
        """torch.autograd.grad hands a parameter's gradient out instead of accumulating it."""
        # Those at rest answer for themselves, before it begins.
        whole = (bucket for bucket in self.runtime.trained.buckets if bucket.is_whole)
        members = (member for b in whole for member in b.members if member.param.requires_grad)
        for member in members if self.runtime.comm.size > 1 else ():
            if (answer := is_handed_out(member.param)) is not None:
                return handed_out(member.name) if answer else None
        return None

    # ---- calls -----------------------------------------------------------------------------

    def await_call(self, visit: Visit, outputs: Iterable[Node], inputs: Iterable[Node]) -> None:
        """Ask autograd to tell us when it comes back through a call.

        Args:
            visit: the call.
            outputs: the nodes that made what it returned, but for those of its inputs.
            inputs: the nodes that made what it was given.
        """
        for node in outputs:
            node.register_prehook(partial(self._enter, visit, sequence_number(node)))
        for node in inputs:
            visit.bounded = True
            if is_accumulate_grad(node):
                # A leaf's gradient is due as early as those of the parameters, in any order.
                node.register_prehook(partial(self._leave_when_complete, visit))
                continue
            node.register_prehook(partial(self._leave, visit))
            self._ending.setdefault(sequence_number(node), []).append(weakref.ref(visit))

    def _enter(self, visit: Visit, node: int, gradients: Any) -> None:
        """The gradients of a call's outputs are there.

        Often one node made the output of one call and the input of the next: the next has ended,
        and autograd would tell us so only after this.
        """
        self._begin()
        for ref in self._ending.pop(node, ()):
            if (ended := ref()) is not None:
                self.runtime.leave_backward(ended)
        self.runtime.leave_after(node)
        chain = [visit]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        for around in reversed(chain):
            self.runtime.enter_backward(around)

    def _leave(self, visit: Visit, gradients: Any) -> None:
        if self.running:
            self.runtime.leave_backward(visit)

    def _leave_when_complete(self, visit: Visit, gradients: Any) -> None:
        if self.running:
            self.runtime.end_visit(visit)

    # ---- gradients -------------------------------------------------------------------------

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
            set_grad(param, None)
            raise ScheduleError(
                f"the gradient of {bucket.members[index].name!r} carries a graph "
                "(create_graph=True), which averaging over the ranks would lose. A derivative with "
                "respect to inputs is taken with torch.autograd.grad(loss, inputs, create_graph="
                "True); one with respect to parameters inside `with sharded.full_params():`."
            )
        running = self._token is not None and self._token() is not None
        # Taken first: what the shards have when a backward pass begins is set aside.
        if running or not bucket.gradients.was_added_to(index, gradient):
            set_grad(param, None)
        if not running:
            self._begin()
        self.runtime.collect(state, bucket, index, gradient)


def _arrived(backward: weakref.ref[Backward], number: int, param: Tensor) -> None:
    if (alive := backward()) is not None:
        alive._collect(number, param)


def _met(backward: weakref.ref[Backward], _: Tensor) -> None:
    if (alive := backward()) is not None:
        alive._begin()


class _Token:
    """Held by autograd's queue of callbacks alone: it dies with the backward pass."""

    __slots__ = ("__weakref__",)


skip_in_dynamo(Backward._enter, Backward._leave, Backward._leave_when_complete, Backward._end)
skip_in_dynamo(_arrived, _met)
