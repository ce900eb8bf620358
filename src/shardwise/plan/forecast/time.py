"""Time of one training step: its events once more, on two lanes, the device's and the link's.

    device   ── forward 0 ─┬─ forward 1 ───── … ─┐ waits ┌─ backward 1 ─ … ─┐ optimizer
    link     ── gather 1 ──┴─ gather 2 ── … ─────────────┴─ reduce 1 ── … ──┘

A collective begins when the device comes to its event and the link is free. The device waits for it
where the schedule does: a gather before the unit's use, a reduce when it is settled, or averaged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from shardwise.plan.blueprint import Blueprint
from shardwise.plan.forecast.collectives import Network
from shardwise.plan.forecast.machine import Machine, known
from shardwise.plan.forecast.memory import state_nbytes
from shardwise.plan.forecast.passes import Passes
from shardwise.plan.forecast.rates import EAGER, Rates, Seconds
from shardwise.plan.forecast.work import Pass, StepWork
from shardwise.plan.schedule.decide import events
from shardwise.plan.schedule.events import Event, Op, Phase, UnitBytes
from shardwise.plan.spec import BucketSpec

Convention = Literal["full", "causal", "computed"]
"""How FLOP are counted: attention over all pairs of tokens (Chowdhery et al. 2022, PaLM), over
those that a causal mask leaves (NVIDIA), or all that is computed, recomputation too (HFU)."""
# Seconds of AdamW on a host's cores for each parameter: 0.22 s for a billion (Ren et al. 2021,
# ZeRO-Offload, arXiv 2101.06840, table 4).
ON_HOST = 0.22e-9
LINK = frozenset({Op.GATHER, Op.UPDATE, Op.REDUCE, Op.AVERAGE, Op.LOAD, Op.STORE})


class Interval(NamedTuple):
    """One entry of a lane."""

    lane: Literal["device", "link"]
    op: Op  # ``EXIT``: the unit computes
    unit: str
    phase: Phase
    start: float
    stop: float
    bound: str  # what takes most of it


@dataclass
class _Lanes:
    """The clocks of both lanes, and what has happened so far."""

    contention: float
    device: float = 0.0
    link: float = 0.0
    strain: float = 0.0  # of what is under way, the mean: see ``Ring.strain``
    exposed: float = 0.0
    ready: dict[tuple[Op, str], float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)

    def compute(self, event: Event, seconds: Seconds) -> None:
        """The device computes; a collective under way takes part of its memory and its cores.

        It takes the more, the more it moves in that time: one between hosts takes less.
        """
        start, total = self.device, seconds.total
        overlapped = min(total, max(0.0, self.link - start))
        self.device += total + self.contention * self.strain * overlapped
        cue = Op.EXIT, event.unit, event.phase
        self.intervals.append(Interval("device", *cue, start, self.device, seconds.bound))

    def send(self, event: Event, seconds: float, strain: float) -> None:
        """The link carries out an event, after those that it has begun."""
        start = max(self.device, self.link)
        if seconds:
            before = start - self.device
            self.strain = (self.strain * before + strain * seconds) / (before + seconds)
        self.link = self.ready[event.op, event.unit] = start + seconds
        entry = Interval("link", *event[:3], start, self.link, "link")
        self.intervals.append(entry)

    def wait(self, op: Op, unit: str) -> None:
        """The device waits for an event of the link."""
        self._wait_until(self.ready.pop((op, unit), 0.0))

    def end(self) -> None:
        """The device waits for all of them."""
        self._wait_until(self.link)

    def _wait_until(self, moment: float) -> None:
        late = max(0.0, moment - self.device)
        self.exposed += late
        self.device += late


@dataclass(frozen=True)
class MicroBatch:
    """Time of the forward and backward pass of one micro-batch.

    Attributes:
        seconds: from its first event to its last.
        computed: what the device computes, in sum.
        exposed: seconds in which the device waits for the link.
        intervals: both lanes, in order of their events.
    """

    seconds: float
    computed: Seconds
    exposed: float
    intervals: tuple[Interval, ...]

    @property
    def contended(self) -> float:
        """Seconds that computing takes longer because of what the link does meanwhile."""
        return self.seconds - self.exposed - self.computed.total


def walk(
    listed: Iterable[Event],
    nbytes: Mapping[str, UnitBytes],
    work: StepWork,
    rates: Rates,
    network: Network,
) -> MicroBatch:
    """Play one micro-batch's events on both lanes."""
    durations = _Durations(work, rates)
    lanes, computed, turned = _Lanes(rates.contention), Seconds(), False
    for event in listed:
        op, unit, phase, _ = event
        if op is Op.AVERAGE:
            lanes.wait(Op.REDUCE, unit)
        if op in LINK:
            if unit in nbytes:
                lanes.send(
                    event, network.seconds(op, nbytes[unit]), network.strain(op, nbytes[unit])
                )
        elif op is Op.SETTLE:
            lanes.wait(Op.REDUCE, unit)
            lanes.wait(Op.AVERAGE, unit)
        elif op is Op.ENTER:
            if phase is Phase.BACKWARD and not turned:
                turned, loss = True, durations.rest
                lanes.compute(Event(Op.EXIT, "", phase), loss)
                computed += loss
            lanes.wait(Op.GATHER, unit)
        elif op is Op.EXIT:
            seconds = durations.of(unit, phase)
            lanes.compute(event, seconds)
            computed += seconds
    lanes.end()
    return MicroBatch(lanes.device, computed, lanes.exposed, tuple(lanes.intervals))


class _Durations:
    """Seconds of each call of a unit; alike units are asked for once."""

    def __init__(self, work: StepWork, rates: Rates) -> None:
        self.work, self.rates = work, rates
        cues = (*work.order.forward, *work.order.backward)
        self.calls = Counter((cue.unit, cue.phase) for cue in cues if cue.op is Op.EXIT)
        self.known: dict[tuple[int, bool, int], Seconds] = {}

    @property
    def rest(self) -> Seconds:
        rest, seconds = self.work.rest, self.rates.seconds
        return seconds(rest.forward, written=rest.forward.kernels) + seconds(rest.backward)

    def of(self, unit: str, phase: Phase) -> Seconds:
        """Seconds of one call."""
        if unit not in self.work.units:
            return Seconds()
        work = self.work.units[unit]
        part, written = work.backward, work.recomputed
        if phase is Phase.FORWARD:
            part = written = work.forward
        calls = self.calls[unit, phase]
        key = id(part), unit in self.rates.kernels.narrow, calls
        if key not in self.known:
            seconds = self.rates.seconds(part, unit, written.kernels)
            self.known[key] = seconds / calls + self.rates.call
        return self.known[key]


@dataclass(frozen=True)
class TimeForecast:
    """Time of one step of the optimizer, on each rank.

    Attributes:
        micro_batches: each kind, and how many of them a step has.
        optimizer: seconds of its own step, and of the engine for any step.
        work: of one micro-batch.
        peak: FLOP/s that the vendor promises in bf16, the base of MFU.
    """

    micro_batches: tuple[tuple[MicroBatch, int], ...]
    optimizer: float
    work: StepWork
    peak: float

    @cached_property
    def seconds(self) -> float:
        return self.optimizer + sum(one.seconds * times for one, times in self.micro_batches)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one rank."""
        return self.work.tokens * sum(times for _, times in self.micro_batches) / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what bounds them; they sum to ``seconds``."""
        parts: defaultdict[str, float] = defaultdict(float)
        for one, times in self.micro_batches:
            computed = one.computed
            parts["products"] += times * computed.products
            parts["attention"] += times * computed.attention
            parts["memory"] += times * computed.moved
            parts["host"] += times * (computed.total - computed.device)
            parts["exposed communication"] += times * one.exposed
            parts["contention"] += times * one.contended
        parts["optimizer"] += self.optimizer
        return dict(parts)

    def mfu(self, convention: Convention = "full") -> float:
        """Model FLOP utilisation, as publishers count it."""
        times = sum(times for _, times in self.micro_batches)
        return flops(self.work, convention) * times / self.seconds / self.peak


def forecast(
    blueprint: Blueprint,
    work: StepWork,
    machine: Machine,
    kinds: Sequence[Passes] = (Passes("train"),),
    optimizer: str = "adamw",
) -> TimeForecast:
    """Predict the time of a step of the optimizer.

    Args:
        work: of one micro-batch.
        kinds: the passes of one step.
        optimizer: its name; see ``memory.OPTIMIZERS``.
    """
    rates = Rates(machine.accelerator, EAGER, known().constants)
    network, nbytes = Network.of(machine, blueprint.grid), blueprint.nbytes
    walked = {
        mode: walk(events(work.order, blueprint.policy, nbytes, mode), nbytes, work, rates, network)
        for mode in {kind.mode: None for kind in kinds}
    }
    micro_batches = tuple((walked[mode], times) for mode, times, _ in kinds)
    here = [spec for spec in blueprint.buckets if not spec.in_host]
    moved = sum(_stepped(blueprint, spec, optimizer) for spec in here)
    seconds = optimizer_seconds(moved, rates) + _on_host(blueprint, machine)
    seconds += machine.accelerator.step
    return TimeForecast(micro_batches, seconds, work, machine.accelerator.peak("bf16"))


def _on_host(blueprint: Blueprint, machine: Machine) -> float:
    """Seconds of a step of the optimizer on the cores of a host, which its ranks share."""
    specs = (spec for spec in blueprint.buckets if spec.in_host and spec.trainable)
    numel = sum(spec.layout.shard_numel for spec in specs)
    return numel * min(machine.per_host, blueprint.grid.size) * ON_HOST


def _stepped(blueprint: Blueprint, spec: BucketSpec, optimizer: str) -> int:
    """Bytes that the optimizer moves: parameters and state both ways, gradients one way."""
    state = state_nbytes(spec, blueprint.parameters, optimizer)
    return 2 * state + 3 * spec.rest_nbytes * spec.trainable


def flops(work: StepWork, convention: Convention) -> float:
    """FLOP of one micro-batch by a convention."""
    units = (*work.units.values(), work.rest)
    if convention == "computed":
        return sum(_flops(part) for unit in units for part in (unit.forward, unit.backward))
    return sum(3 * _flops(unit.forward, halved=convention == "causal") for unit in units)


def _flops(part: Pass, halved: bool = True) -> float:
    """FLOP of a pass; ``halved``: without what a causal kernel leaves out."""
    return sum(p.flops * times / (1 + (p.causal and halved)) for p, times in part.products)


def optimizer_seconds(moved: float, rates: Rates) -> float:
    """Time of a step of the optimizer, which reads and writes so many bytes."""
    return moved / (rates.accelerator.bandwidth * rates.constants.bandwidth)
