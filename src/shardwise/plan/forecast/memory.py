"""Forecast of one rank's memory at each event of a step, and of what its peak consists.

The engine's memory follows from its buckets and events alone, to the byte; what the model keeps
and takes between two cues follows from the work that was observed.

    span 0 │ gather a │ enter a │ span 1 │ exit a │ free a │ …     engine's bytes change at events,
                                                                   activations within spans

All bytes are those of tensors. A process on CPU holds more: libraries, which a calibration
measures, and what is freed and kept, for which ``MemoryForecast.process`` has a rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

from torch import Tensor

from shardwise.config.options import blocks
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.forecast.holdings import POOLED, Holdings, Kind, Use
from shardwise.plan.forecast.machine import Accelerator, Machine
from shardwise.plan.forecast.work import Level, Span, StepWork
from shardwise.plan.printed import size
from shardwise.plan.schedule.decide import steps
from shardwise.plan.schedule.events import Event, Mode, Order
from shardwise.plan.spec import BucketSpec

OPTIMIZERS = {"adamw": (2, 4), "sgd": (0, 0), "momentum": (1, 0)}
"""Of torch.optim: tensors like the parameter, and further bytes (the step's number) for each."""
AVERAGED = "+ema"  # after the optimizer's name: with a moving average of the parameters
START, MOMENTUM = "+start", "+momentum"
"""And after that, of ``outer.DiLoCo``: its common start, and from the first exchange a momentum."""
LEAST_8_BITS = 4096  # elements of a parameter whose state bitsandbytes quantises
TABLES_8_BITS = 2 * 256 * 4  # bytes of what its codes mean, which all parameters have in common
OUTSIDE = "(no unit)"  # the loss, and modules without parameters
MOST_LINES = 8  # of an explanation, by kind and by unit
APART = 0.8  # of holes of the forward pass, the part that does not join: docs/planning.md
FIRST_STEP = 26 << 20  # bytes that a process's first step loads and makes beside tensors
_COUNTED = POOLED | {Kind.ACTIVATIONS}  # by ``process`` otherwise


@dataclass(frozen=True)
class Moment:
    """A moment of a step: an event, or a span, which lies between two cues.

    Attributes:
        event: ``None``: a span, in which the model computes.
        unit: whose; ``None``: no unit computes.
        alive: bytes when it has ended.
        peak: bytes at most meanwhile.
        in_host: bytes in host memory, where that is not the device's.
        received: of ``alive``, memory in which others' parts of sums are received.
    """

    event: Event | None
    unit: str | None
    alive: int
    peak: int
    in_host: int
    received: int = 0

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.unit or 'no unit'} computes"
        return f"{self.event.op} {self.event.unit or '(root)'}, {self.event.phase}"


class Heap(NamedTuple):
    """Activations as the C library holds them.

    Attributes:
        blocks, mapped: bytes at most of storages below the threshold, which leave holes; of others.
        holes: bytes that the forward pass of units that are not recomputed leaves in holes.
        freed: bytes of holes that recomputed units leave, where those of each span's largest size
            count twice: less that is small fits them.
        engine: bytes of small tensors of the engine at most, which fill holes.
        recomputes: there are units that are recomputed.
    """

    blocks: int = 0
    mapped: int = 0
    holes: int = 0
    freed: int = 0
    engine: int = 0
    recomputes: bool = False

    @classmethod
    def of(cls, work: StepWork) -> Heap:
        """Add up the spans of a step."""
        spans = (*work.forward, *work.backward)
        blocks = reduce(Level.then, (span.blocks for span in spans))
        mapped = reduce(Level.then, (span.mapped for span in spans))
        again = {unit for unit, each in work.units.items() if each.recomputed.kernels}
        holes = sum(span.holes for span in work.forward if span.unit not in again)
        freed = sum(span.freed + span.holes for span in work.forward if span.unit in again)
        return cls(blocks.peak, mapped.peak, holes, freed, recomputes=bool(again))

    def held(self, kept: float) -> int:
        """Bytes of all at most, holes included; ``kept``: see ``MemoryForecast.process``.

        Objects of autograd lie beside all blocks of the forward pass and keep holes apart. Those
        of what is recomputed end with it, so most of its holes join.
        """
        holes = int(APART * max(0, self.holes)) + int(kept * max(0, self.freed))
        return self.blocks + self.mapped + max(self.engine, holes)


@dataclass(frozen=True)
class MemoryForecast:
    """One rank's memory in a step.

    Attributes:
        moments: all events and spans, in order.
        uses: bytes at the peak, and those in host memory then; the largest first.
        most: bytes of each kind on the device at most, at any moment.
        pooled: bytes of those in the engine's pages at most, at any moment.
        heap: activations as a process on CPU holds them.
    """

    moments: tuple[Moment, ...]
    uses: tuple[tuple[Use, int], ...]
    most: Mapping[Kind, int]
    pooled: int
    heap: Heap

    @cached_property
    def at_peak(self) -> Moment:
        """The moment of the peak; of equal ones the first."""
        return max(self.moments, key=lambda moment: moment.peak)

    @property
    def peak(self) -> int:
        """Bytes at most on the device."""
        return self.at_peak.peak

    def process(self, kept: float) -> int:
        """Bytes of a process on CPU at most, without libraries.

        The engine's pages and the C library keep what they have had, each at another moment: what
        passes seldom fits where blocks of other sizes were, and has memory of its own.

        Args:
            kept: of what recomputed units free, the part that the C library has in holes.
        """
        lasting = sum(n for kind, n in self.most.items() if kind not in _COUNTED)
        return lasting + self.pooled + self.heap.held(kept) + FIRST_STEP

    @property
    def in_host(self) -> int:
        """Bytes at most of what is kept in host memory."""
        return max(moment.in_host for moment in self.moments)

    def on_device(self, own: Accelerator) -> int:
        """Bytes of tensors on ``own`` at most; of a CPU that was measured, those of a process."""
        if own.kept is None:
            return self.peak
        return self.process(own.kept) + own.recomputing * self.heap.recomputes

    def held(self, own: Accelerator) -> int:
        """Bytes of ``own`` at most, without what is reserved."""
        return self.on_device(own) + own.within(self.in_host)

    def filled(self, machine: Machine, ranks: int) -> float:
        """The part of memory that it fills: see ``Machine.filled``."""
        own = machine.accelerator
        return machine.filled(self.held(own), own.beside(self.in_host), ranks)

    @property
    def between_steps(self) -> int:
        """Bytes on the device when the step has ended, its gradients included."""
        return self.moments[-1].alive

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes on the device at the peak, by kind; the largest first."""
        return _largest_first((use.kind, n) for use, n in self.uses if not use.in_host)

    @property
    def by_unit(self) -> dict[str, int]:
        """Bytes on the device at the peak, by unit; the largest first."""
        return _largest_first((use.unit, n) for use, n in self.uses if not use.in_host)

    def __str__(self) -> str:
        return "\n".join(self.why())

    def why(self) -> Iterator[str]:
        """Lines that explain the peak: its moment, and what is alive then."""
        yield f"peak {size(self.peak)}, while {self.at_peak}"
        for title, parts in (("kind", self.by_kind), ("unit", self.by_unit)):
            for name, nbytes in list(parts.items())[:MOST_LINES]:
                share = nbytes / max(self.peak, 1)
                yield f"  {title}  {name or '(root)':<32} {size(nbytes):>10} {share:4.0%}"


def _largest_first(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, nbytes in parts:
        sums[name] += nbytes
    return {name: nbytes for name, nbytes in sums.most_common() if nbytes}


def forecast(
    blueprint: Blueprint,
    order: Order,
    work: StepWork | None = None,
    optimizer: str = "adamw",
    mode: Mode = "train",
    reduced: int = 0,
) -> MemoryForecast:
    """Predict the memory of a pass in which the optimizer has its state.

    Args:
        order: the cues of the step; where there is ``work``, its own.
        work: ``None``: the engine's memory alone.
        optimizer: its name; see ``OPTIMIZERS``, ``AVERAGED`` and ``START``.
        mode: as of a schedule; ``work`` is that of a pass with gradients.
        reduced: passes in mode ``"train"`` before it, of the same step, to whose gradients it adds.
    """
    walk = _Walk(blueprint, optimizer)
    for _ in range(reduced):
        walk.reduce(order)
    moments = tuple(walk.through(order, work, mode))
    uses = sorted(walk.ledger.at_peak.items(), key=lambda item: item[1], reverse=True)
    heap = (Heap() if work is None else Heap.of(work))._replace(engine=walk.ledger.small)
    return MemoryForecast(moments, tuple(uses), walk.ledger.most, walk.ledger.pooled, heap)


class _Walk:
    """A walk through a step, which notes what is in use."""

    def __init__(self, blueprint: Blueprint, optimizer: str) -> None:
        self._blueprint = blueprint
        self._holdings = Holdings(blueprint.specs)
        self.ledger = self._holdings.ledger
        for spec in blueprint.buckets:
            nbytes = state_nbytes(spec, blueprint.parameters, optimizer)
            self.ledger.add(Use(Kind.OPTIMIZER, spec.unit, spec.in_host), nbytes)
        nbytes, in_host = common_state(blueprint.buckets, optimizer)
        self.ledger.add(Use(Kind.OPTIMIZER, OUTSIDE, in_host), nbytes)

    def reduce(self, order: Order) -> None:
        """A pass before, whose mean gradients become those of the step."""
        deque(self.through(order, None, "train"), maxlen=0)
        self._holdings.deliver()

    def through(self, order: Order, work: StepWork | None, mode: Mode) -> Iterator[Moment]:
        """Each event, and each span of ``work`` between them."""
        if work is not None:
            self.ledger.add(Use(Kind.BUFFERS, ""), work.buffers)
            self.ledger.add(Use(Kind.BATCH, ""), work.inputs)
        nbytes, policy = self._blueprint.nbytes, self._blueprint.policy
        first = _first_gradients(order, self._blueprint) if work is None else work.first_gradients
        if mode in ("between", "last"):
            for unit, places in first.items():
                self._holdings.collect(unit, places, keeps=True)
            for unit in policy.left_whole(order):
                self._holdings.gather(unit)
        coming, played = _by_place(first), steps(order, policy, nbytes, mode)
        behind = len(order.forward)  # cues before the backward pass
        for number, (step, spans) in enumerate(zip(played, _spans(work, len(played)), strict=True)):
            for unit, names in coming.get(number - behind, {}).items():
                self._holdings.collect(unit, names, keeps=mode in ("accumulate", "between"))
            yield from map(self._compute, spans)
            yield from map(self._carry_out, step.in_order())

    def _compute(self, span: Span) -> Moment:
        unit = OUTSIDE if span.unit is None else span.unit
        use, ledger = Use(Kind.ACTIVATIONS, unit), self.ledger
        ledger.peak = ledger.now
        ledger.add(use, span.peak)
        ledger.add(use, span.grown - span.peak)
        ledger.add(use._replace(in_host=True), span.in_host)
        return Moment(None, span.unit, ledger.now, ledger.peak, ledger.in_host)

    def _carry_out(self, event: Event) -> Moment:
        ledger = self.ledger
        ledger.peak = ledger.now
        self._holdings.take(event)
        return Moment(event, event.unit, ledger.now, ledger.peak, ledger.in_host, ledger.received)


def _spans(work: StepWork | None, steps: int) -> Sequence[Sequence[Span]]:
    """The spans before each step, which has one cue; before the first of backward there are two."""
    if work is None:
        return [()] * steps
    forward, backward = work.forward, work.backward
    turn = (forward[-1], *backward[:1])
    return [*zip(forward[:-1]), turn, *zip(backward[1:])]


def _first_gradients(order: Order, blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """Expect a unit's gradients as soon as it is entered; for no work was observed."""
    cues, firsts = [cue.unit for cue in order.backward], dict[str, dict[str, int]]()
    for spec in blueprint.buckets:
        if spec.trainable and spec.unit in cues:
            place = cues.index(spec.unit) + 1
            firsts.setdefault(spec.unit, {}).update({slot.name: place for slot in spec.slots})
    return firsts


def _by_place(first: Mapping[str, Mapping[str, int]]) -> dict[int, dict[str, set[str]]]:
    """Turn the places of gradients, by unit and parameter, into what comes at each place."""
    coming: dict[int, dict[str, set[str]]] = {}
    for unit, places in first.items():
        for name, place in places.items():
            coming.setdefault(place, {}).setdefault(unit, set()).add(name)
    return coming


def state_nbytes(spec: BucketSpec, shards: Mapping[str, Tensor], optimizer: str) -> int:
    """Bytes of this rank's optimizer state for a bucket, without what all have in common."""
    if not spec.trainable:
        return 0
    return sum(_state_of(optimizer, slot.numel, shards[slot.name]) for slot in spec.slots)


def common_state(specs: Iterable[BucketSpec], optimizer: str) -> tuple[int, bool]:
    """Bytes of optimizer state that all parameters have in common; are they in host memory?"""
    for spec in specs if optimizer.startswith("adamw_8bit") else ():
        if spec.trainable and any(slot.numel >= LEAST_8_BITS for slot in spec.slots):
            return TABLES_8_BITS, spec.in_host
    return 0, False


def _state_of(optimizer: str, numel: int, shard: Tensor) -> int:
    """Bytes of one rank's part of ``numel`` elements."""
    for outer in (MOMENTUM, START):
        if optimizer.endswith(outer):
            return 4 * shard.numel() + _state_of(optimizer.removesuffix(outer), numel, shard)
    if optimizer.endswith(AVERAGED):  # in float32 at least
        average = shard.numel() * max(4, shard.itemsize)
        return average + _state_of(optimizer.removesuffix(AVERAGED), numel, shard)
    if optimizer == "adamw_8bit":  # codes, and a scale in float32 for each block; or float32
        part = shard.numel()
        return 2 * (part + 4 * blocks(part) if numel >= LEAST_8_BITS else 4 * part)
    copies, more = OPTIMIZERS[optimizer]
    return copies * shard.nbytes + more
