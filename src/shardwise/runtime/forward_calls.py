"""Forward calls, as the backward pass comes back to them: which of them it is in.

Autograd tells when it comes to a node of the graph and when a parameter's gradient is there. It
does not tell when a module's backward pass begins or ends. A ``ForwardCall`` ties them together:
the backward pass of a call begins at a node that made its outputs, and it has ended when autograd
comes to a node that made its inputs. Every call below is drawn as ``input ─▶ call ─▶ output``;
the backward pass goes from right to left.

A plain block: one node begins it, another ends it.

    x ─▶ node a ─▶ [ block ] ─▶ node b ─▶ loss         enter at b, leave at a

One node ends a call and begins another one. Autograd tells of both at once, so the calls that
end there are left first.

    x ─▶ [ block 0 ] ─▶ node a ─▶ [ block 1 ] ─▶ node b ─▶ loss
                                                       at a: leave block 1, enter block 0

An input that is a leaf (``x.requires_grad_()``). Its gradient and those of the parameters come in
any order, so both are waited for.

    leaf x ─▶ [ block ] ─▶ node b                      leave when x and every parameter have theirs

Nothing that requires gradients goes in: an embedding of integers, or frozen inputs. The call has
ended when each of its parameters is trained and has its gradient, or when autograd comes to a
node that is older than the call. Each thread numbers the nodes that it makes, later ones higher,
and on a device a reentrant checkpoint recomputes in autograd's thread. So only numbers of one
thread are compared, and none says which node it is.

    ids ─▶ [ embedding ] ─▶ node 7 ─▶ …                leave with the weight's gradient,
    node 3 ─▶ [ block ] ─▶ …                           or at node 3, if the call began at 5

A tied weight: its gradient is the sum over all uses, so it is complete at the last one only. The
embedding has to be left by numbers, and while another call of the unit waits for its backward
pass, complete gradients end no call.

    ids ─▶ [ embedding ] ─▶ … ─▶ [ head, same weight ] ─▶ loss

A call without such inputs that has calls inside it ends after them, at the latest with the pass.

    ids ─▶ [ model: [ embedding ] ─▶ [ block ] ] ─▶ loss

A second backward pass through a retained graph enters and leaves the same calls once more. Only
nodes of the graph hold a call, so a graph that is thrown away takes its calls along.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet


class _Thread(threading.local):
    """The present thread, whose number another one may have when it has ended."""

    def __init__(self) -> None:
        self.identity = object()


_thread = _Thread()


@dataclass(eq=False, slots=True, weakref_slot=True)
class ForwardCall:
    """A forward call of ``unit`` (``None``: of the model around its units)."""

    unit: str | None
    parent: ForwardCall | None  # the call around it, whose backward pass begins first
    first_node: int  # autograd's number at its beginning; its nodes are not below it
    input_nodes: set[object] = field(default_factory=set)  # those that made its inputs
    end_is_seen: bool = False  # its inputs require gradients, so autograd tells of them
    has_calls_inside: bool = False  # of units; its backward pass ends after theirs
    is_open: bool = False  # its backward pass is under way
    inputs_done: bool = False  # the inputs have their gradients, and not all parameters do
    #: In which it runs.
    thread: object = field(default_factory=partial(getattr, _thread, "identity"))

    @property
    def ends_unseen(self) -> bool:
        """Can its end be seen neither from its inputs nor from calls inside it?"""
        return not self.end_is_seen and not self.has_calls_inside


class ForwardCalls:
    """The forward calls of a model whose backward pass is to come or under way.

    ``enter`` and ``leave`` are called with a unit when that of one of its calls begins and ends;
    ``enter`` also with whether its gradients may come ``together``, as none ends the call.
    """

    def __init__(self, enter: Callable[..., None], leave: Callable[[str], None]) -> None:
        self._enter, self._leave = enter, leave
        self._to_come: dict[str, WeakSet[ForwardCall]] = defaultdict(WeakSet)  # or open
        self._open: list[ForwardCall] = []  # the first that began comes first

    def expect(self, call: ForwardCall) -> None:
        """A forward call has ended; its outputs carry gradients."""
        if call.parent is not None:
            call.parent.has_calls_inside = True
        if call.unit is not None:
            self._to_come[call.unit].add(call)

    def expects(self, unit: str) -> bool:
        """Is the backward pass of a call of ``unit`` to come, or under way?"""
        return bool(self._to_come[unit]) or any(call.unit == unit for call in self._open)

    def come_to(self, call: ForwardCall, node: object, number: int) -> None:
        """Autograd is at a node that made an output of ``call``.

        Args:
            node: its identity.
            number: among the nodes of the thread of ``call``.
        """
        for one in self._open[::-1]:
            is_older = one.first_node > number and one.thread is call.thread
            if node in one.input_nodes or (is_older and one.ends_unseen):
                self.leave(one)
        self._begin(call)

    def _begin(self, call: ForwardCall) -> None:
        if call.parent is not None:
            self._begin(call.parent)
        if call.unit is None or call.is_open:
            return
        call.is_open, call.inputs_done = True, False
        self._open.append(call)
        self._enter(call.unit, together=not call.ends_unseen)

    def leave(self, call: ForwardCall) -> None:
        """The unit of ``call`` has computed all its gradients."""
        if not call.is_open or call.unit is None:
            return
        call.is_open = False
        self._to_come[call.unit].discard(call)
        self._open.remove(call)
        self._leave(call.unit)

    def inputs_complete(self, call: ForwardCall, parameters_complete: bool) -> None:
        """The gradients of its inputs are there; those of its parameters, perhaps."""
        if parameters_complete:
            self.leave(call)
        else:
            call.inputs_done = True

    def parameters_complete(self, unit: str, all_trained: bool) -> None:
        """Every gradient of a unit is there; ``all_trained``: no parameter is without one."""
        for call in self._open[:]:
            if call.unit == unit and (call.inputs_done or (call.ends_unseen and all_trained)):
                self.leave(call)

    def leave_all(self, units: Sequence[str]) -> None:
        """The backward pass is over: the calls whose end was not seen end now, in this order."""
        for call in sorted(self._open, key=lambda call: units.index(call.unit or "")):
            self.leave(call)

    def forget(self) -> None:
        """The pass has stopped. A call whose graph is used after all begins again."""
        for call in self._open:
            call.is_open = False
        self._open.clear()
        self._to_come.clear()
