"""Forecasts of candidates for one question; what they share is drawn and observed once.

Memory and time of a model of alike blocks grow by the same amount with each block. So a candidate
is estimated from two models of few blocks, by the line through both:

    bytes, seconds     │                          / estimate, 80 blocks
                       │      / 6 blocks
                       │    / 4 blocks

    shared by candidates with the same             is made
    micro-batch, recomputation                     an observation of the model
    strategy, mesh, offload, wire, residency       a blueprint, and its seconds on the link
    the same, prefetch, recomputation              the engine's bytes at each moment
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.comm.grid import Grid, shape_of
from shardwise.config.options import Options
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.blueprint import Blueprint, draw_on, units_of
from shardwise.plan.forecast import memory, time
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.collectives import CORES
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.memory import MemoryForecast
from shardwise.plan.forecast.moments import EngineMoments, activations
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.question import Question
from shardwise.plan.forecast.rates import EAGER, Rates
from shardwise.plan.forecast.repeated import Stack, deepen, shallow, stack_of
from shardwise.plan.forecast.time import TimeForecast
from shardwise.plan.forecast.work import Span, StepWork
from shardwise.plan.residency import joined_trained
from shardwise.plan.units.structure import all_nbytes
from shardwise.plan.units.units import Units
from shardwise.plan.units.wrap import automatic

R = TypeVar("R")
OF_MODEL = {"model", "bytes", "units", "units of", "stack"}  # on any number of ranks
OBSERVED = {"observed", "work"}  # of as long rows, too


class Forecast(NamedTuple):
    """Memory and time of a candidate."""

    candidate: Candidate
    memory: MemoryForecast
    time: TimeForecast


class Peak(NamedTuple):
    """Bytes at most on the device, and in host memory beside it."""

    device: float
    in_host: float


class _Depth(NamedTuple):
    """The model with so many blocks; ``stack``: ``None`` if it has none that are alike."""

    model: nn.Module
    stack: Stack | None
    blocks: int


class Planner:
    """Forecasts for one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._made: dict[tuple[Any, ...], Any] = {}
        machine = question.machine
        rates = Rates(machine.accelerator, EAGER, known().constants)
        self._contention = rates.contention * CORES  # at least

    def about(self, question: Question) -> Planner:
        """Return a planner for another question about the model, also with adapters."""
        other, own, same = Planner(question), self.question, {"alike"}
        if question.model is own.model:
            same |= OF_MODEL | (OBSERVED if question.inputs is own.inputs else set())
        other._made = {k: v for k, v in self._made.items() if k[0] in same}
        return other

    def forecast(self, candidate: Candidate) -> Forecast:
        """The whole model, exactly. Raises ``ConfigError``: its rows cannot be split so."""
        self.question.check(candidate)
        most = max(self.memories(candidate), key=lambda each: each.peak)
        return Forecast(candidate, most, self.time(candidate))

    def time(self, candidate: Candidate) -> TimeForecast:
        """The time of a step of the whole model."""
        return self._time(candidate, self._whole(candidate))

    def memories(self, candidate: Candidate, alone: bool = False) -> list[MemoryForecast]:
        """The memory of each kind of micro-batch of a step, in order.

        Args:
            alone: without what the model computes and keeps.
        """
        depth = self._whole(candidate)
        blueprint, work = self._blueprint(candidate, depth), self._work(candidate, depth)
        work = _without_activations(work) if alone else work
        return [
            memory.forecast(blueprint, work.order, work, self.question.optimizer, mode, reduced)
            for mode, _, reduced in self.question.passes(candidate)
        ]

    # ---- estimates -----------------------------------------------------------------------------

    def peak(self, candidate: Candidate) -> Peak:
        """Estimate its memory."""
        device, in_host = self._line(candidate, partial(self._peaks, candidate))
        own = self.question.machine.accelerator
        return Peak(device + own.within(in_host), own.beside(in_host))

    def activations(self, candidate: Candidate) -> float:
        """Bytes of activations at most: less than any strategy takes."""

        def most(depth: _Depth) -> tuple[float]:
            alive, within, _ = activations(self._work(any_one, depth))
            return (float((alive + within).max()),)

        any_one = Candidate("full_shard", candidate.micro_batch, recompute=candidate.recompute)
        key = "activations", candidate.micro_batch, candidate.recompute
        return self._once(key, lambda: self._line(any_one, most)[0])

    def seconds(self, candidate: Candidate) -> float:
        """Estimate a step of it."""
        return self._line(candidate, lambda depth: (self._time(candidate, depth).seconds,))[0]

    def computed(self, candidate: Candidate) -> float:
        """Seconds in which the device computes, in a step: as many in strategies of equal units."""

        def total(depth: _Depth) -> tuple[float]:
            (first, _), *_ = self._time(candidate, depth).micro_batches
            return (first.computed.total,)

        key = "computed", candidate.micro_batch, candidate.recompute, self._joined(candidate)
        once = self._once(key, lambda: self._line(candidate, total)[0])
        return once * self.question.micro_batches(candidate)

    def least(self, candidate: Candidate) -> float:
        """Seconds below which no step of it is, however well the link is hidden.

        Computing beside it is slowed by ``contention``, or less by a link that is slower than those
        inside a host. So of the link's seconds, at most
        ``1 / (1 + contention)`` cost nothing, and those only while there is something to compute.
        What is in host memory takes no less, so it is not looked at.
        """
        times = [kind.times for kind in self.question.passes(candidate)]

        def busy(depth: _Depth) -> tuple[float, ...]:
            whole = self._time(candidate, depth)
            links = [
                sum(each.stop - each.start for each in one.intervals if each.lane == "link")
                for one, _ in whole.micro_batches
            ]
            return whole.optimizer, *links

        alone = replace(candidate, offload="none")
        key = "busy", *_drawn(alone), candidate.recompute, len(times)
        optimizer, *links = self._once(key, lambda: self._line(alone, busy))
        computed, slowed = self.computed(candidate) / sum(times), 1 - 1 / (1 + self._contention)
        walks = (max(s, computed + slowed * min(s, computed)) for s in links)
        return optimizer + sum(n * walk for n, walk in zip(times, walks, strict=True))

    def _line(
        self, candidate: Candidate, at: Callable[[_Depth], tuple[float, ...]]
    ) -> tuple[float, ...]:
        """Follow the lines through the values at two depths to the depth of the whole model."""
        depths = self._depths(candidate)
        first, *second = map(at, depths)
        if not second:
            return first
        stack, (few, more) = depths[0].stack, (depth.blocks for depth in depths)
        assert stack is not None
        further = (stack.depth - more) / (more - few)
        return tuple(b + (b - a) * further for a, b in zip(first, *second, strict=True))

    # ---- memory and time -----------------------------------------------------------------------

    def _peaks(self, candidate: Candidate, depth: _Depth) -> tuple[float, float]:
        """Bytes at most on the device, and in host memory."""
        mode, _, reduced = self.question.passes(candidate)[-1]  # has most gradients
        kind = candidate.prefetch, candidate.recompute, mode, reduced
        key = (*_drawn(candidate), *kind, depth.blocks)
        work, own = self._work(candidate, depth), self.question.machine.accelerator

        def walked() -> MemoryForecast:
            blueprint = self._blueprint(candidate, depth)
            optimizer = self.question.optimizer
            return memory.forecast(blueprint, work.order, work, optimizer, mode, reduced)

        def of_process() -> tuple[int, int]:
            whole = walked()
            return whole.on_device(own), whole.in_host

        if own.kept is not None:  # a heap is more than the engine's bytes and activations
            return self._once(("process", candidate.micro_batch, *key), of_process)
        return self._once(key, lambda: EngineMoments.of(walked(), work)).most(work)

    def _time(self, candidate: Candidate, depth: _Depth) -> TimeForecast:
        question, kinds = self.question, self.question.passes(candidate)
        drawn = self._blueprint(candidate, depth), self._work(candidate, depth)
        return time.forecast(*drawn, question.machine, kinds, question.optimizer)

    # ---- what candidates share -----------------------------------------------------------------

    def _once(self, key: tuple[Any, ...], make: Callable[[], R]) -> R:
        if key not in self._made:
            self._made[key] = make()
        return cast("R", self._made[key])

    def _whole(self, candidate: Candidate) -> _Depth:
        """All blocks: observed, unless few stand for them."""
        stack = self._stack(candidate)
        return _Depth(self.question.model, stack, stack.depth if stack else 0)

    def _stack(self, candidate: Candidate) -> Stack | None:
        """The blocks that are alike, where each is of units of its own and few stand for all."""
        units = self._units(candidate, _Depth(self.question.model, None, 0))
        key = "stack", max(1, candidate.recompute), id(units)
        return self._once(key, lambda: self._find_stack(candidate, units))

    def _find_stack(self, candidate: Candidate, units: Units) -> Stack | None:
        stack = stack_of(self.question.model, max(1, candidate.recompute))
        if stack is None:
            return None
        if not {*range(stack.depth)} <= {stack.number_of(unit.name) for unit in units}:
            return None
        return stack if self._once(("alike",), lambda: self._is_alike(candidate, stack)) else None

    def _is_alike(self, candidate: Candidate, stack: Stack) -> bool:
        """Is a step of few blocks, repeated, that of all? A model may compute between them.

        Asked once, of one micro-batch without recomputation, of blocks that share no unit, and of
        the forward pass alone: from that the backward pass follows.
        """
        arguments = self.question.arguments
        alone = {"wrap": replace(arguments.get("wrap") or automatic(), joined_nbytes=0)}
        plainest = replace(self.question, loss=_no_loss, arguments={**arguments, **alone})
        plain, every = replace(candidate, recompute=0), replace(stack, period=1)
        few, whole = _Depth(plainest.model, every, every.depth), _Depth(plainest.model, None, 0)
        in_a_heap = self.question.machine.accelerator.kept is not None

        def forward(depth: _Depth) -> StepWork:
            work = Planner(plainest)._work(plain, depth)
            spans = work.forward[:-1]  # then the graph goes
            if not in_a_heap:  # which what was freed long before tells apart
                spans = tuple(replace(span, freed=0, holes=0) for span in spans)
            return replace(work, forward=spans)

        try:
            forward(few)  # which makes the tables that a process makes once
            repeated = forward(few)
        except ConfigError:  # it starts too many kernels
            raise
        except Exception:  # noqa: BLE001 - a model's own code may count its blocks
            return False
        return repeated == forward(whole)

    def _depths(self, candidate: Candidate) -> list[_Depth]:
        stack = self._stack(candidate)
        if stack is None:
            return [self._whole(candidate)]
        few, period = stack.kept, stack.period
        return [self._shallow(stack, few), self._shallow(stack, few + period)]

    def _shallow(self, stack: Stack, blocks: int) -> _Depth:
        few = self._once(("model", blocks), lambda: shallow(self.question.model, stack, blocks))
        return _Depth(few, stack, blocks)

    def _blueprint(self, candidate: Candidate, depth: _Depth) -> Blueprint:
        units = self._units(candidate, depth)
        key = "blueprint", *_drawn(candidate), id(units)
        drawn = self._once(key, lambda: self._draw(candidate, depth.model, units))
        if candidate.prefetch == 1:  # the largest unit, as usual, or as written
            return drawn
        ahead = candidate.prefetch * max(unit.gathered for unit in drawn.nbytes.values())
        return replace(drawn, policy=replace(drawn.policy, prefetch=Prefetch(ahead, ahead)))

    def _draw(self, candidate: Candidate, model: nn.Module, units: Units) -> Blueprint:
        device = torch.device(self.question.machine.accelerator.device)
        placement, options = placement_of(candidate.strategy), self._options(candidate, model)
        return draw_on(self._grid(candidate), device, units, placement, options)

    def _grid(self, candidate: Candidate) -> Grid:
        question, placement = self.question, placement_of(candidate.strategy)
        per_host = min(question.machine.per_host, question.ranks)
        shape = shape_of(placement.name, placement.hybrid, question.ranks, candidate.mesh, per_host)
        return question.sharing(Grid.of(0, question.ranks, placement.splits, shape))

    def _units(self, candidate: Candidate, depth: _Depth) -> Units:
        """One object for all candidates that have the same: what follows is made once for it."""
        joined, wrap = self._joined(candidate), self.question.arguments.get("wrap")

        def make() -> Units:
            units = units_of(depth.model, wrap, self._options(candidate, depth.model), joined)
            return self._once(("units of", *(unit.modules for unit in units)), lambda: units)

        return self._once(("units", joined, bool(candidate.recompute), depth.blocks), make)

    def _joined(self, candidate: Candidate) -> int:
        """Return what units depend on, besides recomputation: of all blocks, not a few."""
        placement, model = placement_of(candidate.strategy), self.question.model

        def make() -> int:
            options = self._options(candidate, model)
            return joined_trained(model, placement, self._grid(candidate), options)

        return self._once(("joined", *_drawn(candidate)), make)

    def _options(self, candidate: Candidate, model: nn.Module) -> Options:
        options = {key: value for key, value in self.question.arguments.items() if key != "wrap"}
        whole = self._once(("bytes", id(model)), lambda: all_nbytes((model,)))
        return Options(
            **options
            | {
                "offload": candidate.offload,
                "unsharded": int(candidate.unsharded * whole) or None,
                "activation_checkpointing": candidate.checkpointing or False,
                "precision": self._precision(candidate),
                **dict(candidate.written),
            }
        )

    def _precision(self, candidate: Candidate) -> Precision:
        names = {"reduce_dtype": candidate.wire, "param_dtype": candidate.computes}
        dtypes: Any = {key: getattr(torch, name) for key, name in names.items() if name}
        return replace(self.question.precision, **dtypes)

    def _work(self, candidate: Candidate, depth: _Depth) -> StepWork:
        few = self._shallow(depth.stack, depth.stack.kept) if depth.stack else depth
        units, rows = self._units(candidate, few), candidate.micro_batch
        how = rows, candidate.checkpointing, candidate.computes, id(units)

        def make() -> StepWork:
            observed = self._once(("observed", *how), observe_few)
            if depth.stack is None:
                return observed
            buffers = sum(buffer.nbytes for buffer in depth.model.buffers())
            return replace(deepen(observed, depth.stack, depth.blocks), buffers=buffers)

        def observe_few() -> StepWork:
            args, kwargs = self.question.inputs(rows)
            call = few.model, units, args, kwargs
            options = self._precision(candidate), self.question.loss, self._in_slot
            return observe(*call, candidate.checkpointing, *options)

        return self._once(("work", *how, depth.blocks), make)

    @property
    def _in_slot(self) -> bool:
        """Does the engine compute gradients of large layers where it sends them from?"""
        on_cpu = self.question.machine.accelerator.device == "cpu"
        return on_cpu and not self.question.arguments.get("compile")

    def recipe(self, candidate: Candidate) -> dict[str, Any]:
        """The keys of a recipe that set it, with names in full."""
        drawn = self._blueprint(candidate, self._whole(candidate))
        keys, ahead = candidate.recipe, drawn.policy.prefetch.forward
        if candidate.unsharded:
            keys["sharding.unsharded"] = drawn.options.unsharded
        if ahead is not None:
            keys["sharding.prefetch.forward"] = keys["sharding.prefetch.backward"] = ahead
        return keys


def _no_loss(_: Any) -> Tensor:
    return torch.zeros((), device="meta", requires_grad=True)


def _drawn(candidate: Candidate) -> tuple[Any, ...]:
    """Return what a blueprint depends on, besides its units."""
    c = candidate
    return c.strategy, c.mesh, c.offload, c.unsharded, c.written, c.wire, c.computes


def _without_activations(work: StepWork) -> StepWork:
    forward, backward = (
        tuple(Span(span.unit, 0, 0) for span in spans) for spans in (work.forward, work.backward)
    )
    return replace(work, forward=forward, backward=backward, inputs=0, buffers=0)
