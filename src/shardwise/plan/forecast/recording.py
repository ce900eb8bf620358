"""A recording of kernels and of the bytes alive, span by span, while a step runs on meta tensors.

Forward, a cue begins the next span. Backward, autograd numbers the nodes in the order in which
they were made, so the number of the node that runs tells the span that made it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardwise.errors import ConfigError
from shardwise.plan.forecast.kernels import is_kernel, moved, products
from shardwise.plan.forecast.work import MMAP_THRESHOLD, Level, Pass, Product, Span, UnitWork
from shardwise.plan.order import mirror
from shardwise.plan.schedule.events import Cue, Op, Order
from shardwise.plan.spec import SMALL_GRADIENT
from shardwise.torch_internals import (
    TorchDispatchMode,
    current_node,
    flash_attention,
    grouped_mm,
    is_accumulate_grad,
    next_sequence_number,
    sequence_number,
    storage_key,
    tree_leaves,
)

MOST_KERNELS = 100_000  # that are observed; a 70B Llama with adapters, recomputed, has 49,518

_Bytes = Counter[str | None]


@dataclass
class _Kernels:
    """Kernels so far."""

    products: Counter[Product] = field(default_factory=Counter)
    moved: int = 0
    count: int = 0
    gradients: int = 0

    def add(
        self, operator: Any, args: Sequence[Any], read: list[Tensor], results: list[Tensor]
    ) -> None:
        if not is_kernel(operator, read, results):
            return
        counted = products(operator, args, results)
        self.products.update(counted)
        self.moved += 0 if counted else moved(operator, read, results)
        self.count += 1

    def __add__(self, other: _Kernels) -> _Kernels:
        every = self.products + other.products
        gradients = self.gradients + other.gradients
        return _Kernels(every, self.moved + other.moved, self.count + other.count, gradients)

    def as_pass(self) -> Pass:
        return Pass(tuple(self.products.items()), self.moved, self.count, self.gradients)


@dataclass
class _Span:
    """A span that goes on."""

    unit: str | None
    alive: int  # bytes when it began
    in_host: int
    peak: int  # bytes alive at most so far
    blocks: int = 0  # of storages below the threshold: bytes when it began, and at most so far
    blocks_peak: int = 0
    mapped_peak: int = 0  # of the others
    holes: int = 0  # bytes of holes when it began
    freed: Counter[int] = field(default_factory=Counter)  # made and freed blocks, by bytes
    kernels: _Kernels = field(default_factory=_Kernels)
    repeated: _Kernels = field(default_factory=_Kernels)

    def until(self, following: _Span) -> Span:
        grown, in_host = following.alive - self.alive, following.in_host - self.in_host
        blocks = Level(following.blocks - self.blocks, self.blocks_peak - self.blocks)
        mapped = Level(grown - blocks.grown, self.mapped_peak - (self.alive - self.blocks))
        largest = max(self.freed, default=0)
        freed = largest * self.freed[largest]
        peak, holes = self.peak - self.alive, following.holes - self.holes
        return Span(self.unit, grown, peak, in_host, blocks, mapped, freed, holes)

    def note(self, alive: int, blocks: int) -> None:
        """So many bytes are alive."""
        self.peak = max(self.peak, alive)
        self.blocks_peak = max(self.blocks_peak, blocks)
        self.mapped_peak = max(self.mapped_peak, alive - blocks)


class Recording(TorchDispatchMode):
    """Notes, while it is entered, kernels and storages.

    Args:
        held: tensors that are there before and after: parameters, buffers, the batch.
        maps_from: bytes from which a CPU's blocks are mapped each for itself: the threshold.
    """

    def __init__(self, held: Iterable[Tensor], maps_from: int = MMAP_THRESHOLD) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cues: list[Cue] = []
        self._held = {storage_key(tensor): tensor for tensor in held}
        self._maps_from, self._started = maps_from, 0
        self._made: dict[int, ref[Any]] = {}  # every other storage that is alive
        self._alive, self._copied = _Bytes(), _Bytes()  # by the unit that made them; in host memory
        self._saved, self._kept = _Bytes(), _Bytes()  # the same when the backward pass begins
        self._blocks = 0  # bytes alive of storages below the threshold
        self._holes = list[int]()  # where the forward pass has freed some, the smallest first
        self._forward, self._backward = [_Span(None, 0, 0, 0)], list[_Span]()
        self._first_nodes = [next_sequence_number()]  # of each span of the forward pass
        self._calls: list[tuple[str | None, int]] = [(None, 0)]  # under way: unit, number of cue
        self._shows: list[bool] = []  # for each cue that ends a call: does that return tensors?
        self._reached = set[int]()  # spans of the forward pass to whose nodes autograd comes
        self._has_graph = set[int]()  # cues that end calls whose outputs have nodes
        self._comes_to = set[int]()  # of them, those to whose outputs it comes
        self._holds: list[bool] = []  # for each cue: does its end tell of small gradients?
        self._inputs: list[int] = []  # for each cue: the span that made what its call is given
        #: By unit and parameter: the number of the backward span.
        self.first_gradients: dict[str, dict[str, int]] = {}
        self._first_small: dict[str, dict[str, int]] = {}

    # ---- the step as it goes on ----------------------------------------------------------------

    def cue(self, cue: Cue, output: Any = None, given: Any = ()) -> None:
        """A call begins, or has ended with ``output``; a recomputation has no cues.

        Small gradients come when a call ends, if what it was ``given`` has a gradient or another
        call with one is inside; as in ``runtime.forward_calls``.
        """
        if self._backward:
            return
        self.cues.append(cue)
        self._shows.append(bool(_tensors(output)))
        self._holds.append(any(tensor.requires_grad for tensor in _tensors(given)))
        made = [sequence_number(node) for node in _nodes_of(given) if not is_accumulate_grad(node)]
        last = bisect_right(self._first_nodes, max(made)) - 1 if made else len(self.cues) - 1
        self._inputs.append(last)
        if cue.op is Op.ENTER:
            self._calls.append((cue.unit, len(self.cues) - 1))
        else:
            _, entered = self._calls.pop()
            nodes = _nodes_of(output, self._first_nodes[entered])
            for node in nodes:
                node.register_prehook(partial(_note_that, self._comes_to, len(self.cues) - 1))
            if comes := bool(nodes):
                self._has_graph.add(len(self.cues) - 1)
            self._holds[-1] = self._holds[entered]
            self._holds[self._calls[-1][1]] |= comes and self._calls[-1][0] is not None
        self._first_nodes.append(next_sequence_number())
        self._forward.append(self._next(self._calls[-1][0]))

    def turn(self) -> None:
        """The backward pass begins."""
        self._saved, self._kept = _Bytes(self._alive), _Bytes(self._copied)
        self._backward.append(self._next(None))

    def holds(self, tensor: Tensor) -> bool:
        """Is it a parameter, a buffer or of the batch?"""
        return storage_key(tensor) in self._held

    def take_gradient(self, unit: str, name: str, param: Tensor) -> None:
        """A gradient has come. It goes to its bucket at once, so it is not alive here."""
        param.grad = None
        self._span.kernels.gradients += 1
        first = self._first_small if param.numel() < SMALL_GRADIENT else self.first_gradients
        first.setdefault(unit, {}).setdefault(name, len(self._backward) - 1)

    def copy_to_host(self, copy: object, nbytes: int) -> None:
        """Host memory has ``copy`` as long as that lives."""
        unit = self._span.unit
        self._copied[unit] += nbytes
        finalize(copy, self._copied.subtract, {unit: nbytes})

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._go_back()
        self._started += 1
        if self._started > MOST_KERNELS:
            raise ConfigError(
                f"a micro-batch starts more than {MOST_KERNELS:,} kernels, as where a model "
                "computes one token after the other, and to observe them all would take minutes. "
                "Plan shorter rows, such as --seq 32."
            )
        output = _executed(operator, args, kwargs or {})
        if operator.overloadpacket is flash_attention:
            output = (_laid_out_by_the_kernel(output[0]), output[1])
        made = _tensors(output)
        for tensor in made:
            self._note(tensor)
        repeats = self._backward and torch.is_grad_enabled()
        kernels = self._span.repeated if repeats else self._span.kernels
        kernels.add(operator, args, _tensors((args, kwargs)), made)
        return output

    @property
    def _span(self) -> _Span:
        return self._backward[-1] if self._backward else self._forward[-1]

    def _next(self, unit: str | None) -> _Span:
        alive, blocks, in_host = self._alive.total(), self._blocks, self._copied.total()
        holes = sum(self._holes)
        return _Span(unit, alive, in_host, alive, blocks, blocks, alive - blocks, holes)

    def _note(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._made or key in self._held:
            return
        storage, span = tensor.untyped_storage(), self._span
        nbytes = storage.nbytes()
        self._made[key] = ref(storage, partial(self._end, key, span, nbytes))
        self._change(span.unit, nbytes)
        span.note(self._alive.total(), self._blocks)

    def _end(self, key: int, span: _Span, nbytes: int, _: object) -> None:
        del self._made[key]
        self._change(span.unit, -nbytes)
        if span is self._span and nbytes < self._maps_from:
            span.freed[nbytes] += 1

    def _change(self, unit: str | None, nbytes: int) -> None:
        self._alive[unit] += nbytes
        if abs(nbytes) < self._maps_from:
            self._blocks += nbytes
            if not self._backward:
                self._fill(nbytes)

    def _fill(self, nbytes: int) -> None:
        """A block fills the smallest hole that is larger: more is asked for than it takes."""
        if nbytes < 0:
            insort(self._holes, -nbytes)
        elif (at := bisect_right(self._holes, nbytes)) < len(self._holes):
            insort(self._holes, self._holes.pop(at) - nbytes)

    def _go_back(self) -> None:
        """Begin the spans up to the one that made the node that autograd executes."""
        node = current_node() if self._backward else None
        if node is None:
            return
        place = bisect_right(self._first_nodes, sequence_number(node)) - 1
        self._reached.add(place)
        self._go_back_to(place)

    def _go_back_to(self, place: int) -> None:
        while len(self._backward) < len(self._forward) - place:
            self._backward.append(self._next(self._forward[-1 - len(self._backward)].unit))

    # ---- the step as it was --------------------------------------------------------------------

    def finish(self) -> tuple[Order, tuple[Span, ...], tuple[Span, ...]]:
        """End the step; return its cues, and the spans of both passes."""
        self._go_back_to(0)
        every = [*self._forward, *self._backward, self._next(None)]
        spans = [before.until(after) for before, after in pairwise(every)]
        forward, (first, *rest) = spans[: len(self._forward)], spans[len(self._forward) :]
        listed, backward, places = list[int](), [first], [0]
        for numbers, span in zip(self._came_back(), rest, strict=True):
            if numbers:
                backward += [Span(None, 0, 0)] * (len(numbers) - 1) + [span]
            else:
                backward[-1] = backward[-1].then(span)
            listed += numbers
            places.append(len(listed))
        mirrored = mirror(self.cues)
        self._place_gradients(mirrored, places, listed)
        order = Order(tuple(self.cues), tuple(mirrored[number] for number in listed))
        return order, tuple(forward), tuple(backward)

    def _came_back(self) -> Iterator[list[int]]:
        """Yield, for each mirrored cue, the numbers of those that come there.

        A call ends where autograd comes to what made its inputs, which may be given to others,
        too; of several that end there the last that began is the first. As in
        ``runtime.forward_calls``.
        """
        begins, begun = self._coming(), list[int]()
        for place in reversed(range(len(self.cues))):
            ended = [call for call in reversed(begun) if place <= self._inputs[call]]
            begun = [call for call in begun if place > self._inputs[call]]
            started = [place] if place in begins else []
            begun += [begins[end] for end in started]
            yield [len(self.cues) - 1 - number for number in (*ended, *started)]

    def _coming(self) -> dict[int, int]:
        """Return the calls to which the backward pass comes: each one's last cue → its first.

        To what a call returned; of what hides in an object only kernels tell. Of a forward pass
        alone, to all that has a graph.
        """
        coming, entered = dict[int, int](), list[int]()
        comes_to = self._comes_to or self._has_graph
        for place, cue in enumerate(self.cues):
            if cue.op is Op.ENTER:
                entered.append(place)
                continue
            first = entered.pop()
            hidden = not self._shows[place] and self._reached & {*range(first + 1, place + 1)}
            if hidden or place in comes_to:
                coming[place] = first
        return coming

    def _place_gradients(
        self, cues: Sequence[Cue], places: Sequence[int], listed: Sequence[int]
    ) -> None:
        """Number the spans in which gradients came as the cues that are ``listed`` divide them.

        Small ones come at the end of their call, where that tells of them.
        """
        holds, numbered = self._holds[::-1], {number: at for at, number in enumerate(listed)}
        for firsts in self.first_gradients.values():
            firsts.update({name: places[at] for name, at in firsts.items()})
        for unit, firsts in self._first_small.items():
            own = [at for at, cue in enumerate(cues) if cue.unit == unit]
            for name, came in firsts.items():
                begun = [at for at in own if at < came]
                is_held = bool(begun) and cues[begun[-1]].op is Op.ENTER and holds[begun[-1]]
                ends = [numbered[at] for at in own if at >= came and at in numbered]
                place = ends[0] if is_held and ends else places[came]
                self.first_gradients.setdefault(unit, {})[name] = place

    def work_of(self, unit: str | None) -> UnitWork:
        """The work of one unit, or of none."""
        forward = [span for span in self._forward if span.unit == unit]
        backward = [span for span in self._backward if span.unit == unit]
        repeated = _summed(span.repeated for span in backward)
        return UnitWork(
            unit or "",
            forward=_summed(span.kernels for span in forward).as_pass(),
            backward=_summed([repeated, *(span.kernels for span in backward)]).as_pass(),
            recomputed=repeated.as_pass(),
            saved=self._saved[unit],
            in_host=self._kept[unit],
        )


def _summed(kernels: Iterable[_Kernels]) -> _Kernels:
    return sum(kernels, start=_Kernels())


def _nodes_of(tree: Any, first: int = 0) -> list[Node]:
    """The nodes of autograd that made its tensors, of those made from the number ``first`` on."""
    nodes = [tensor.grad_fn for tensor in _tensors(tree) if tensor.grad_fn is not None]
    return [node for node in nodes if sequence_number(node) >= first]


def _note_that(places: set[int], place: int, _: Any) -> None:
    places.add(place)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _executed(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call it. Grouped products of meta tensors torch makes in bfloat16 alone, real ones in any."""
    if operator.overloadpacket is not grouped_mm:
        return operator(*args, **kwargs)
    left, right = args[:2]
    each = len(args[2]) if left.ndim == 2 else len(left)
    groups = (each,) if left.ndim == right.ndim else ()
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


def _laid_out_by_the_kernel(mixed: Tensor) -> Tensor:
    """Attention's output as kernels lay it out, by places and then heads."""
    return torch.empty_permuted(mixed.shape, (0, 2, 1, 3), dtype=mixed.dtype, device="meta")
