"""Begin and end of each unit, forward and backward, in a graph that torch traces.

In the forward pass modules' hooks tell. In the backward pass autograd's nodes do: each has the
number that it got in the forward pass, so the unit whose call made it is known, and autograd goes
from high numbers to low ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardwise.plan.schedule.events import Cue, Op, Phase
from shardwise.runtime.pytrees import grad_fns, tensors
from shardwise.torch_internals import is_accumulate_grad, next_sequence_number, sequence_number


class Placed(NamedTuple):
    """A cue, and the number of the graph's nodes that lie before it."""

    cue: Cue
    at: int


class _Call(NamedTuple):
    """A forward call of a unit; autograd's nodes of it have numbers in ``[start, stop)``."""

    unit: str
    start: int
    stop: int


class Watch:
    """Notes cues while torch traces.

    Args:
        unit_names: the modules whose forward uses a unit, with the unit's name.

    Attributes:
        cues: in order, once the pass has ended.
        backward_at: nodes before the backward pass.
        names: of all nodes; torch removes those that nobody uses.
    """

    def __init__(self, unit_names: Mapping[nn.Module, str]) -> None:
        self._unit_names = unit_names
        self.cues: list[Placed] = []
        self.backward_at = -1
        self.names: tuple[str, ...] = ()
        self._calls: list[_Call] = []
        self._open: list[int] = []
        self._moments: list[tuple[int, int]] = []  # autograd's number, and position

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install hooks on the units' modules inside the block."""
        with ExitStack() as hooks:
            for module, unit in self._unit_names.items():
                enter, leave = partial(self._enter, unit), partial(self._leave, unit)
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, unit: str, *_: object) -> None:
        if self.backward_at < 0:  # else an activation checkpoint recomputes
            self._open.append(len(self._calls))
            self._calls.append(_Call(unit, next_sequence_number(), 0))
            self.cues.append(Placed(Cue(Op.ENTER, unit, Phase.FORWARD), _position()))

    def _leave(self, unit: str, *_: object) -> None:
        if self.backward_at < 0:
            index = self._open.pop()
            self._calls[index] = self._calls[index]._replace(stop=next_sequence_number())
            self.cues.append(Placed(Cue(Op.EXIT, unit, Phase.FORWARD), _position()))

    def begin_backward(self, outputs: Any) -> None:
        """The forward pass is over, and autograd's graph of ``outputs`` is complete."""
        self.backward_at = _position()
        for node in _reachable(grad_fns(tensors(outputs))):
            node.register_prehook(partial(self._comes_to, sequence_number(node)))

    def _comes_to(self, number: int, _: object) -> None:
        self._moments.append((number, _position()))

    def end(self) -> None:
        """The backward pass is over."""
        self.names = tuple(node.name for node in _graph().nodes)
        self.cues += _backward_cues(self._calls, self._moments, len(self.names))


def _graph() -> fx.Graph:
    mode = get_proxy_mode()
    assert mode is not None, "torch does not trace"
    graph: fx.Graph = mode.tracer.graph
    return graph


def _position() -> int:
    return len(_graph().nodes)


def _reachable(roots: Sequence[Node]) -> list[Node]:
    seen: dict[Node, None] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen and not is_accumulate_grad(node):
            seen[node] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
    return list(seen)


def _backward_cues(
    calls: Sequence[_Call], moments: Sequence[tuple[int, int]], end: int
) -> Iterator[Placed]:
    """A call's backward pass lasts from the last of its nodes to the first."""
    waiting, running = list(calls), list[_Call]()
    for number, at in moments:
        while running and number < running[-1].start:
            yield Placed(Cue(Op.EXIT, running.pop().unit, Phase.BACKWARD), at)
        for call in [call for call in waiting if call.start <= number < call.stop]:
            waiting.remove(call)
            running.append(call)
            yield Placed(Cue(Op.ENTER, call.unit, Phase.BACKWARD), at)
    for call in reversed(running):
        yield Placed(Cue(Op.EXIT, call.unit, Phase.BACKWARD), end)
