"""A search among candidates: many are estimated from a few blocks, the best are forecast whole.

Memory and time of a model of alike blocks grow by the same amount with each block. So a candidate
is forecast for two models of few blocks, and the line through both gives its estimate:

    bytes, seconds     │                          / estimate, 80 blocks
                       │      / 6 blocks
                       │    / 4 blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardwise.comm.grid import Grid, shape_of
from shardwise.config.options import Options
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.blueprint import Blueprint, draw_on
from shardwise.plan.forecast import memory, time
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.forecast.memory import MemoryForecast
from shardwise.plan.forecast.observe import Loss, loss_of, observe
from shardwise.plan.forecast.rates import Kernels
from shardwise.plan.forecast.repeated import Stack, deepen, shallow, stack_of
from shardwise.plan.forecast.time import TimeForecast
from shardwise.plan.forecast.work import StepWork

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Question:
    """A training run that is asked about.

    Attributes:
        model: on the meta device.
        inputs: rows of a micro-batch → arguments of the model's forward.
        machine: of the ranks.
        ranks: how many there are.
        rows: of a step, over all ranks; ``None``: one micro-batch of each rank.
        optimizer: its name.
        arguments: of ``shard()`` that no candidate chooses, such as ``wrap`` and ``precision``.
        kernels: the software that computes.
        loss: of what the model returns.
    """

    model: nn.Module
    inputs: Callable[[int], Inputs]
    machine: Machine
    ranks: int
    rows: int | None = None
    optimizer: str = "adamw"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kernels: Kernels = field(default_factory=Kernels)
    loss: Loss = loss_of

    def micro_batches(self, candidate: Candidate) -> int:
        """Micro-batches of a step on each rank."""
        return 1 if self.rows is None else self.rows // (candidate.micro_batch * self.ranks)

    def check(self, candidate: Candidate) -> None:
        """Raises ``ConfigError`` if the rows of a step cannot be split so."""
        at_a_time = candidate.micro_batch * self.ranks
        if self.rows is not None and (self.rows < at_a_time or self.rows % at_a_time):
            raise ConfigError(
                f"{self.rows:,} rows in a step cannot be split into micro-batches of "
                f"{candidate.micro_batch:,} on each of {self.ranks:,} ranks. Choose a multiple of "
                f"{at_a_time:,}, such as {max(1, round(self.rows / at_a_time)) * at_a_time:,}."
            )


class Forecast(NamedTuple):
    """Memory and time of a candidate."""

    candidate: Candidate
    memory: MemoryForecast
    time: TimeForecast


class Estimate(NamedTuple):
    """Bytes at most on the device, and in host memory, and seconds of a step, of a candidate."""

    candidate: Candidate
    peak: float
    in_host: float
    seconds: float


class _Depth(NamedTuple):
    """The model with so many blocks; ``stack``: ``None`` if it has none that are alike."""

    model: nn.Module
    stack: Stack | None
    blocks: int


class Planner:
    """Forecasts for one question; what candidates share is drawn and observed once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._blueprints: dict[tuple[Any, ...], Blueprint] = {}
        self._observed: dict[tuple[int, int], StepWork] = {}
        self._works: dict[tuple[int, int, int], StepWork] = {}
        self._engines: dict[tuple[Any, ...], _Engine] = {}
        self._models: dict[tuple[str, int], nn.Module] = {}
        self._stacks: dict[int, Stack | None] = {}

    def forecast(self, candidate: Candidate) -> Forecast:
        """The whole model, exactly."""
        self.question.check(candidate)
        depth = self._whole(candidate.recompute)
        blueprint, work = self._blueprint(candidate, depth), self._work(candidate, depth)
        modes = (
            memory.forecast(blueprint, work.order, work, self.question.optimizer, mode)
            for mode, _ in time.modes(self.question.micro_batches(candidate))
        )
        most = max(modes, key=lambda each: each.peak)
        return Forecast(candidate, most, self._time(candidate, depth))

    def estimates(
        self, candidates: Iterable[Candidate], fits: Callable[[float, float], bool]
    ) -> Iterator[Estimate]:
        """Estimate from few blocks; what does not fit takes forever.

        Args:
            fits: bytes at most on the device, and in host memory → do they fit?
        """
        for candidate in candidates:
            depths = self._depths(candidate.recompute)
            peaks = [self._peaks(candidate, depth) for depth in depths]
            peak, in_host = (self._line(depths, values) for values in zip(*peaks, strict=True))
            seconds = float("inf")
            if fits(peak, in_host):
                steps = [self._time(candidate, depth).seconds for depth in depths]
                seconds = self._line(depths, steps)
            yield Estimate(candidate, peak, in_host, seconds)

    def _line(self, depths: Sequence[_Depth], values: Sequence[float]) -> float:
        """Follow the line through the values at two depths to the depth of the whole model."""
        stack = depths[0].stack
        if stack is None:
            return values[0]
        few, more = (depth.blocks for depth in depths)
        slope = (values[1] - values[0]) / (more - few)
        return values[1] + slope * (stack.depth - more)

    # ---- memory and time -----------------------------------------------------------------------

    def _peaks(self, candidate: Candidate, depth: _Depth) -> tuple[float, float]:
        """Bytes at most on the device, and in host memory."""
        mode = time.modes(self.question.micro_batches(candidate))[0][0]
        key = (*_drawn(candidate), candidate.prefetch, candidate.recompute, mode, depth.blocks)
        if key not in self._engines:
            blueprint, work = self._blueprint(candidate, depth), self._work(candidate, depth)
            whole = memory.forecast(blueprint, work.order, work, self.question.optimizer, mode)
            self._engines[key] = _Engine.of(whole, work)
        return self._engines[key].peaks(self._work(candidate, depth))

    def _time(self, candidate: Candidate, depth: _Depth) -> TimeForecast:
        asked, times = self.question, self.question.micro_batches(candidate)
        drawn = self._blueprint(candidate, depth), self._work(candidate, depth)
        return time.forecast(*drawn, asked.machine, asked.kernels, times, asked.optimizer)

    # ---- what candidates share -----------------------------------------------------------------

    def _whole(self, recompute: int) -> _Depth:
        if recompute not in self._stacks:
            self._stacks[recompute] = stack_of(self.question.model, max(1, recompute))
        stack = self._stacks[recompute]
        return _Depth(self.question.model, stack, stack.depth if stack else 0)

    def _depths(self, recompute: int) -> list[_Depth]:
        whole = self._whole(recompute)
        if whole.stack is None:
            return [whole]
        few, period = whole.stack.kept, whole.stack.period
        return [self._shallow(whole.stack, few), self._shallow(whole.stack, few + period)]

    def _shallow(self, stack: Stack, blocks: int) -> _Depth:
        key = stack.name, blocks
        if key not in self._models:
            self._models[key] = shallow(self.question.model, stack, blocks)
        return _Depth(self._models[key], stack, blocks)

    def _blueprint(self, candidate: Candidate, depth: _Depth) -> Blueprint:
        key = *_drawn(candidate), depth.blocks
        if key not in self._blueprints:
            self._blueprints[key] = self._draw(candidate, depth.model)
        drawn = self._blueprints[key]
        largest = max(unit.gathered for unit in drawn.nbytes.values())
        ahead = None if candidate.prefetch == 1 else candidate.prefetch * largest
        policy = replace(drawn.policy, prefetch=Prefetch(ahead, ahead))
        return replace(drawn, policy=policy)

    def _draw(self, candidate: Candidate, model: nn.Module) -> Blueprint:
        question, placement = self.question, placement_of(candidate.strategy)
        given = dict(question.arguments)
        wrap = given.pop("wrap", None)
        whole = sum(p.numel() * p.itemsize for p in model.parameters())
        options = Options(
            **given
            | {
                "offload": candidate.offload,
                "unsharded": int(candidate.unsharded * whole),
                "activation_checkpointing": candidate.checkpointing or False,
            }
        )
        shape = shape_of(placement.name, placement.hybrid, question.ranks, candidate.mesh, None)
        grid = Grid.of(0, question.ranks, placement.splits, shape)
        device = torch.device(question.machine.accelerator.device)
        return draw_on(grid, device, model, wrap, placement, options)

    def _work(self, candidate: Candidate, depth: _Depth) -> StepWork:
        key = candidate.micro_batch, candidate.recompute, depth.blocks
        if key not in self._works:
            work = self._observe(candidate, depth)
            self._works[key] = deepen(work, depth.stack, depth.blocks) if depth.stack else work
        return self._works[key]

    def _observe(self, candidate: Candidate, depth: _Depth) -> StepWork:
        key = candidate.micro_batch, candidate.recompute
        if key not in self._observed:
            if depth.stack:
                depth = self._shallow(depth.stack, depth.stack.kept)
            args, kwargs = self.question.inputs(candidate.micro_batch)
            precision = self.question.arguments.get("precision", Precision())
            given = depth.model, self._blueprint(candidate, depth).units, args, kwargs
            asked = candidate.checkpointing, precision, self.question.loss
            self._observed[key] = observe(*given, *asked)
        return self._observed[key]


def _drawn(candidate: Candidate) -> tuple[Any, ...]:
    """Return what a blueprint depends on."""
    c = candidate
    return c.strategy, c.mesh, c.offload, c.unsharded, bool(c.recompute)


class _Engine(NamedTuple):
    """The engine's bytes at each moment of a step, without activations."""

    peaks_of_engine: Any  # of each moment
    in_host: Any
    spans: Any  # how many spans lie before it
    is_span: Any
    inputs: int

    @classmethod
    def of(cls, whole: MemoryForecast, work: StepWork) -> _Engine:
        """Take the activations of ``work`` away from the forecast made with it."""
        is_span = np.array([moment.event is None for moment in whole.moments])
        spans = np.cumsum(is_span) - is_span
        peaks = np.array([moment.peak for moment in whole.moments], dtype=np.int64)
        in_host = np.array([moment.in_host for moment in whole.moments], dtype=np.int64)
        engine = cls(peaks, in_host, spans, is_span, work.inputs)
        levels, hosted = engine._activations(work)
        return engine._replace(peaks_of_engine=peaks - levels, in_host=in_host - hosted)

    def peaks(self, work: StepWork) -> tuple[int, int]:
        """Bytes at most on the device, and in host memory, with the activations of ``work``."""
        levels, hosted = self._activations(work)
        more = work.inputs - self.inputs
        return int((self.peaks_of_engine + levels).max()) + more, int((self.in_host + hosted).max())

    def _activations(self, work: StepWork) -> tuple[Any, Any]:
        """Bytes of activations at each moment, at most, and those in host memory."""
        every = (*work.forward, *work.backward)
        grown = np.cumsum([0, *(span.grown for span in every)])
        hosted = np.cumsum([0, *(span.in_host for span in every)])
        within = np.array([*(span.peak for span in every), 0])
        after = self.spans + self.is_span
        return grown[self.spans] + within[self.spans] * self.is_span, hosted[after]
