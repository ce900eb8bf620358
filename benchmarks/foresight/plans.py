"""A case as a plan: what is computed, cut and sent, of a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.foresight.models import Adapted, Block, Decoder, Linear, Variant
from benchmarks.foresight.rows import Case
from benchmarks.foresight.shapes import Shape, few
from shardwise.comm.grid import Grid
from shardwise.config.precision import Precision
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import draw
from shardwise.plan.forecast.collectives import Network
from shardwise.plan.forecast.machine import Accelerator, Constants, Machine
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.passes import Passes, passes_of
from shardwise.plan.forecast.rates import Kernels, Rates
from shardwise.plan.forecast.repeated import Stack, deepen
from shardwise.plan.forecast.time import TimeForecast, optimizer_seconds, walk
from shardwise.plan.forecast.work import Pass, StepWork
from shardwise.plan.schedule.decide import events
from shardwise.plan.schedule.events import Event, Op, UnitBytes
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import by_class

DEQUANTISED = 5.0  # bytes moved for each element of 4 bits: read once, bf16 written and read
ADAMW = 44  # bytes moved for each element: fp32 read and written, gradients, the norm to clip
ADAMW_BF16 = 16  # where all of it is bf16
# Seconds of Python for one call of a module that gathers its own parameters: 0.23 to 0.3 ms in
# Qwen's rows with DeepSpeed's ZeRO-3, 0.35 to 0.45 in fms-acceleration's of adapters under FSDP.
HOOKED = 0.4e-3


@dataclass(frozen=True, eq=False)
class Plan:
    """What a case asks of a machine; all blocks are there.

    Attributes:
        modes: the events of each kind of micro-batch, and how many of them a step has.
        stepped: bytes that the optimizer moves.
    """

    case: Case
    work: StepWork
    nbytes: Mapping[str, UnitBytes]
    grid: Grid
    modes: tuple[tuple[tuple[Event, ...], int], ...]
    stepped: float

    @property
    def measured(self) -> float:
        """Tokens per second of one rank."""
        assert self.case.tokens_per_second is not None
        return self.case.tokens_per_second

    def forecast(self, accelerator: Accelerator, constants: Constants) -> TimeForecast:
        """Time of a step on the case's machine with these constants."""
        one, software = self.case, self.case.software
        hooked = _hooked(one)
        if software.hooks == "all":  # in both passes of a unit
            accelerator = replace(accelerator, unit=accelerator.unit + 2 * hooked)
        machine = replace(_machine(one), accelerator=accelerator)
        blocks = frozenset(unit for unit in self.work.units if unit.startswith("blocks."))
        kernels = Kernels(software.compiled, software.attention, one.precision, blocks)
        rates, network = Rates(accelerator, kernels, constants), Network.of(machine, self.grid)
        walked = tuple(
            (walk(listed, self.nbytes, self.work, rates, network), times)
            for listed, times in self.modes
        )
        seconds = optimizer_seconds(self.stepped, rates)
        if software.hooks == "adapters":
            # torch lets few gathers be under way, so nothing hides those of parts so small
            calls = 2 + (software.checkpointing != "none")
            seconds += hooked * calls * one.shape.layers * one.micro_batches
        return TimeForecast(walked, seconds, self.work, accelerator.peak("bf16"))


def _hooked(case: Case) -> float:
    """Seconds of Python for one pass of a block, beside what the block itself takes."""
    splits = case.strategy in ("full_shard", "hybrid_shard") and case.shards > 1
    if case.software.hooks == "none" or not splits:
        return 0.0
    parts = [*_block(case.shape, case.variant).modules()]
    if case.software.hooks == "all":
        return HOOKED * sum(isinstance(part, Linear) for part in parts)
    return (
        HOOKED * 2 * sum(isinstance(part, Adapted) for part in parts) * case.variant.adapters.wide
    )


@cache  # a fit asks for it once for each forecast
def _block(shape: Shape, variant: Variant) -> Block:
    with torch.device("meta"):
        return Block(shape, variant)


def _machine(case: Case) -> Machine:
    """Its machine, with the latency of all collectives that stand for one of a unit."""
    if not case.software.whole:
        return case.machine
    times = len([*_block(case.shape, case.variant).parameters()])
    links = {name: getattr(case.machine, name) for name in ("inside", "between")}
    links = {name: replace(link, latency=link.latency * times) for name, link in links.items()}
    return replace(case.machine, **links)


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    work = work_of(case)
    blueprint = blueprint_of(case)
    of_two = {unit: _sent(each, case) for unit, each in blueprint.nbytes.items()}
    nbytes = {unit: of_two.get(unit, of_two["blocks.1"]) for unit in work.units}
    placements = dict.fromkeys(work.units, blueprint.placement)
    averages = frozenset(work.units if blueprint.policy.averages else ())  # of all, not of two
    policy = replace(blueprint.policy, placements=placements, averages=averages)
    many = case.micro_batches
    kinds = passes_of(many) if case.sums_once else [Passes("train", many)]
    listed = tuple((events(work.order, policy, nbytes, mode), times) for mode, times, _ in kinds)
    if case.software.scans:
        listed = tuple((_averages_last(each), times) for each, times in listed)
    return Plan(case, work, nbytes, blueprint.grid, listed, _stepped(case))


def work_of(case: Case) -> StepWork:
    """Work of one micro-batch."""
    shape, period = case.shape, 1 + (case.software.checkpointing == "second")
    stack = Stack("blocks", shape.layers, period)
    shorter = few(shape, min(shape.layers, stack.kept))
    work = _observed(shorter, case.variant, case.micro_batch, _classes(case))
    work = _quantised(work, case) if case.quantized else work
    return deepen(work, stack, shape.layers) if shape.layers > stack.kept else work


def _averages_last(listed: Sequence[Event]) -> tuple[Event, ...]:
    """What is summed over copies when the backward pass is over."""
    return tuple(sorted(listed, key=lambda event: event.op is Op.AVERAGE))


def _stepped(case: Case) -> float:
    trained = case.shape.parameters if not case.rank else 0
    pieces = 1 if case.strategy == "no_shard" else case.shards
    return trained / pieces * (ADAMW_BF16 if case.software.stored == "bfloat16" else ADAMW)


@cache
def _model(shape: Shape, variant: Variant, stored: str = "float32") -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape, variant).to(getattr(torch, stored))
    for part in model.modules():
        if variant.adapters.wide and isinstance(part, Adapted):
            part.down.float()
            part.up.float()
    return model


def blueprint_of(case: Case, layers: int = 2) -> Blueprint:
    """The case's model with so many layers, as it is cut."""
    model = _model(few(case.shape, layers), case.variant, case.software.stored)
    mesh = (case.ranks // case.shards, case.shards) if case.strategy == "hybrid_shard" else None
    return draw(
        model,
        case.strategy,
        wrap=by_class(*_classes(case)),
        ranks=(0, case.ranks),
        mesh=mesh,
        precision=_precision(case.variant, case.software.reduce),
    )


def _classes(case: Case) -> tuple[str, ...]:
    """Classes of modules that are units; a table that is the head, too, stays with it."""
    apart = case.software.apart and not case.shape.tied
    return ("Block", "Embedding") if apart else ("Block",)


def _precision(variant: Variant, reduce: str = "float32") -> Precision:
    computes = torch.float32 if variant.autocast else torch.bfloat16
    return Precision(param_dtype=computes, reduce_dtype=getattr(torch, reduce))


def _sent(nbytes: UnitBytes, case: Case) -> UnitBytes:
    """Fewer where parameters travel in 8 or 4 bits."""
    share = 0.25 if case.quantized else 0.5 if case.wire == "fp8" else 1
    return nbytes._replace(gather_sent=int(nbytes.gather_sent * share))


# ---- work --------------------------------------------------------------------------------------


@cache
def _observed(shape: Shape, variant: Variant, rows: int, classes: tuple[str, ...]) -> StepWork:
    model = _model(shape, variant)
    units = choose_units(model, by_class(*classes))
    ids = torch.empty(rows, variant.length, dtype=torch.long, device="meta")
    return observe(model, units, (ids,), {}, None, _precision(variant), lambda loss: loss)


def _quantised(work: StepWork, case: Case) -> StepWork:
    moved = int(case.shape.block_parameters * DEQUANTISED)

    def more(part: Pass, times: int) -> Pass:
        return replace(part, moved=part.moved + times * moved)

    units = {
        name: replace(
            unit,
            forward=more(unit.forward, 1),
            backward=more(unit.backward, 1 + bool(unit.recomputed.kernels)),
        )
        if name.startswith("blocks.")
        else unit
        for name, unit in work.units.items()
    }
    return replace(work, units=units)
