"""Blocks that are alike, one after the other: a few are observed, and stand for all of them.

    model    embed │ 0 │ 1 │ 2 │ 3 │ … │ 79 │ head
    shallow  embed │ 0 │ 1 │ 2 │ 3 │ head              4 blocks; block 2 stands for 2 … 78

The first and the last block are themselves, since what lies beside them is not a block.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from shardwise.plan.forecast.work import Span, StepWork
from shardwise.plan.schedule.events import Cue, Order

FEWEST = 8  # blocks below which nothing is gained


@dataclass(frozen=True)
class Stack:
    """A list of modules that are alike.

    Attributes:
        name: of the list, such as ``"model.layers"``.
        depth: how many blocks it has.
        period: after how many blocks the same comes again: 2 if every second is recomputed.
    """

    name: str
    depth: int
    period: int = 1

    @property
    def kept(self) -> int:
        """Blocks of the shallow model: before a period at least two, after it at least one.

        What the first block is given, the model may still hold when the second one begins.
        """
        return max(4, 3 * self.period + self.depth % self.period)

    def number_of(self, unit: str) -> int | None:
        """The block in which a unit of this name lies; ``None``: in none."""
        rest = unit.removeprefix(f"{self.name}.")
        number = rest.split(".")[0]
        return int(number) if rest != unit and number.isdecimal() else None

    def renamed(self, unit: str, further: int) -> str:
        """The name of the unit at the same place, so many blocks further."""
        number = self.number_of(unit)
        if number is None:
            return unit
        prefix = f"{self.name}.{number}"
        return f"{self.name}.{number + further}{unit.removeprefix(prefix)}"


def stack_of(model: nn.Module, period: int = 1) -> Stack | None:
    """The longest list of alike modules in ``model``, if it is long."""
    lists = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({*map(_kind, module)}) == 1
    )
    stacks = [Stack(name, len(module), period) for name, module in lists]
    longest = max(stacks, key=lambda stack: stack.depth, default=None)
    return longest if longest and longest.depth >= max(FEWEST, longest.kept + period) else None


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules with the same parameters, buffers and printed options."""
    state = (*module.named_parameters(), *module.named_buffers())
    own = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in state]
    return (type(module), repr(module), *own)


def shallow(model: nn.Module, stack: Stack, blocks: int) -> nn.Module:
    """A copy of ``model``, which is on the meta device, with so many blocks."""
    whole = model.get_submodule(stack.name)
    assert isinstance(whole, nn.ModuleList)
    dropped = {id(block): None for block in whole[blocks:]}
    copied = copy.deepcopy(model, dropped)  # what the memo holds is not copied
    layers = copied.get_submodule(stack.name)
    assert isinstance(layers, nn.ModuleList)
    del layers[blocks:]
    return copied


def deepen(work: StepWork, stack: Stack, depth: int) -> StepWork:
    """The work of a model of ``depth`` blocks, from that of the shallow one."""
    forward, backward = work.order
    places = _forward_places(forward, stack, depth)
    back = _backward_places(backward, stack, depth)
    sources = {stack.renamed(forward[i].unit, by): forward[i].unit for i, by in places}
    ends = _Place(len(backward), 0)
    firsts: dict[str, dict[str, int]] = {}
    for number, (place, further) in enumerate((*back, ends)):
        for unit, own in work.first_gradients.items():
            # Outside of the stack a unit is itself, whatever block its parameters are named after.
            by = 0 if stack.number_of(unit) is None else further
            for name in [name for name, span in own.items() if span == place]:
                known = firsts.setdefault(stack.renamed(unit, by), {})
                known.setdefault(stack.renamed(name, by), number)
    return replace(
        work,
        units={unit: replace(work.units[source], unit=unit) for unit, source in sources.items()},
        order=Order(_cues(forward, places, stack), _cues(backward, back, stack)),
        forward=_spans(work.forward, places, stack),
        backward=_spans(work.backward, back, stack),
        first_gradients=firsts,
    )


class _Place(NamedTuple):
    """A cue of the shallow model, and how many blocks further it stands in the whole."""

    cue: int  # its number
    further: int


def _forward_places(cues: Sequence[Cue], stack: Stack, depth: int) -> list[_Place]:
    """Repeat the period before the last block until there are ``depth`` blocks."""
    last = stack.kept - 1
    start, stop = _first(cues, stack, last - stack.period), _first(cues, stack, last)
    further = range(stack.period, depth - stack.kept + 1, stack.period)
    return [
        *(_Place(i, 0) for i in range(stop)),
        *(_Place(i, by) for by in further for i in range(start, stop)),
        *(_Place(i, depth - stack.kept) for i in range(stop, len(cues))),
    ]


def _backward_places(cues: Sequence[Cue], stack: Stack, depth: int) -> list[_Place]:
    """The same, of which the last block comes first."""
    before = stack.kept - 2
    start, stop = _first(cues, stack, before), _first(cues, stack, before - stack.period)
    further = range(depth - stack.kept, -1, -stack.period)
    return [
        *(_Place(i, depth - stack.kept) for i in range(start)),
        *(_Place(i, by) for by in further for i in range(start, stop)),
        *(_Place(i, 0) for i in range(stop, len(cues))),
    ]


def _first(cues: Sequence[Cue], stack: Stack, number: int) -> int:
    return next(i for i, cue in enumerate(cues) if stack.number_of(cue.unit) == number)


def _cues(cues: Sequence[Cue], places: Sequence[_Place], stack: Stack) -> tuple[Cue, ...]:
    return tuple(cues[i]._replace(unit=stack.renamed(cues[i].unit, by)) for i, by in places)


def _spans(spans: Sequence[Span], places: Sequence[_Place], stack: Stack) -> tuple[Span, ...]:
    """A span lies before its cue; the last one lies before none."""
    longer = (_renamed(spans[i], stack, by) for i, by in places)
    return (*longer, spans[-1])


def _renamed(span: Span, stack: Stack, further: int) -> Span:
    unit = span.unit and stack.renamed(span.unit, further)
    return span if unit == span.unit else replace(span, unit=unit)
