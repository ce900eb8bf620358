"""Two lanes: what is computed, what travels meanwhile, and for what the device waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import draw
from shardwise.plan.forecast.collectives import Network
from shardwise.plan.forecast.machine import Accelerator, Link, Machine, known
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.passes import passes_of
from shardwise.plan.forecast.rates import Kernels, Rates
from shardwise.plan.forecast.time import (
    MicroBatch,
    TimeForecast,
    flops,
    forecast,
    optimizer_seconds,
    walk,
)
from shardwise.plan.forecast.work import StepWork
from shardwise.plan.schedule.decide import events
from shardwise.plan.schedule.events import Op, Phase
from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Decoder

LLAMA = ModelConfig(layers=4, width=64, heads=4, kv_heads=4, hidden=128)
RANKS, VOCABULARY, LENGTH = 4, 96, 32
TABLE = known()


def link(bandwidth: float) -> Link:
    return Link("a link", bandwidth, 0.0, "")


def drawn(strategy: str) -> tuple[Blueprint, StepWork]:
    model = Decoder(LLAMA, VOCABULARY, LENGTH)
    blueprint = draw(model, strategy, ranks=(0, RANKS))
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    work = observe(model, blueprint.units, (ids,), {}, loss=lambda logits: logits.mean())
    return blueprint, work


def played(
    strategy: str = "full_shard",
    bandwidth: float = 1e12,
    contention: float = 0.0,
    inside: float = 0.0,
) -> tuple[MicroBatch, StepWork]:
    blueprint, work = drawn(strategy)
    accelerator = replace(TABLE.accelerator("A100"), kernel=0.0, python=0.0, contention=contention)
    links = (link(inside or bandwidth), link(bandwidth), link(bandwidth))
    machine = Machine(accelerator, *links, per_host=RANKS // 2 if inside else RANKS)
    listed = events(work.order, blueprint.policy, blueprint.nbytes)
    rates = Rates(accelerator, Kernels(), TABLE.constants)
    network = Network.of(machine, blueprint.grid)
    return walk(listed, blueprint.nbytes, work, rates, network), work


def test_a_fast_link_leaves_the_first_gather_and_the_last_reduce_exposed() -> None:
    micro, _ = played(bandwidth=1e15)
    assert micro.exposed < 0.01 * micro.seconds
    assert micro.seconds == pytest.approx(micro.computed.total, rel=0.02)


def test_a_slow_link_bounds_the_step_and_is_what_the_device_waits_for() -> None:
    micro, _ = played(bandwidth=1e8)
    sent = sum(i.stop - i.start for i in micro.intervals if i.lane == "link")
    assert micro.seconds == pytest.approx(sent, rel=0.05)
    assert micro.exposed > 0.8 * micro.seconds


def test_each_lane_does_one_thing_at_a_time_and_a_unit_computes_when_it_is_there() -> None:
    micro, _ = played(bandwidth=1e10)
    for lane in ("device", "link"):
        busy = [i for i in micro.intervals if i.lane == lane]
        assert all(a.stop <= b.start + 1e-12 for a, b in pairwise(busy))
    gathered: dict[tuple[str, Phase], float] = {}
    for interval in micro.intervals:
        if interval.op is Op.GATHER:
            gathered[interval.unit, interval.phase] = interval.stop
        elif interval.lane == "device":
            arrival = gathered.get((interval.unit, interval.phase), 0.0)
            assert interval.start >= arrival - 1e-12


def test_computing_takes_longer_while_the_link_is_busy() -> None:
    alone, _ = played(bandwidth=1e11)
    together, _ = played(bandwidth=1e11, contention=0.5)
    assert alone.contended == pytest.approx(0, abs=1e-9)
    assert together.contended > 0


def test_a_link_between_hosts_takes_the_less_from_computing_the_slower_it_is() -> None:
    inside, _ = played(bandwidth=1e11, contention=0.5)
    between, _ = played(bandwidth=1e11, contention=0.5, inside=1e12)
    assert between.contended == pytest.approx(inside.contended * 0.55, rel=0.05)


def test_no_shard_sends_only_gradients() -> None:
    micro, _ = played("no_shard")
    assert {i.op for i in micro.intervals if i.lane == "link"} == {Op.REDUCE}


def test_a_forecast_sums_its_parts_and_counts_flop_by_convention() -> None:
    micro, work = played()
    step = TimeForecast(((micro, 3),), 0.5, work, peak=1e12)
    assert step.seconds == pytest.approx(0.5 + 3 * micro.seconds)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.tokens_per_second == pytest.approx(3 * 2 * LENGTH / step.seconds)
    assert step.mfu() == pytest.approx(3 * flops(work, "full") / step.seconds / 1e12)
    attended = 3 * 2 * 2 * (2 * LENGTH) * LENGTH * LLAMA.width * LLAMA.layers
    assert flops(work, "full") - flops(work, "causal") == attended / 2
    assert flops(work, "computed") < work.flops  # which counts all of a causal product


OPS = Op.GATHER, Op.REDUCE


def sent(micro_batch: MicroBatch, op: Op) -> int:
    return sum(interval.op is op for interval in micro_batch.intervals)


def test_a_step_of_several_micro_batches_is_forecast_from_its_blueprint() -> None:
    blueprint, work = drawn("zero1")
    machine = TABLE.machine("A100")
    once, thrice = (forecast(blueprint, work, machine, passes_of(n)) for n in (1, 3))
    gathered, reduced = ([sent(one, op) for one, _ in thrice.micro_batches] for op in OPS)
    assert gathered[0] > gathered[1] == gathered[2] == 0  # what is whole stays so
    assert reduced[2] > reduced[1] == reduced[0] == 0  # gradients travel once
    assert once.seconds < thrice.seconds < 3 * once.seconds
    parameters = sum(spec.rest_nbytes for spec in blueprint.buckets)
    moved = machine.accelerator.bandwidth * TABLE.constants.bandwidth * once.optimizer
    assert moved == pytest.approx((2 * 2 + 3) * parameters, rel=1e-2)


def test_what_the_engine_takes_on_the_host_is_of_a_step_and_of_each_call() -> None:
    blueprint, work = drawn("zero1")
    machine = TABLE.machine("A100")

    def seconds(engine: Accelerator) -> float:
        return forecast(blueprint, work, replace(machine, accelerator=engine)).seconds

    cpu = replace(machine.accelerator, waits=True)
    assert seconds(replace(cpu, step=1.0)) == pytest.approx(seconds(cpu) + 1)
    of_calls = seconds(replace(cpu, unit=1.0)) - seconds(cpu)
    outside = 2  # before, between and after: half a second each
    assert of_calls == pytest.approx(len(blueprint.buckets) + outside)


def test_the_optimizer_takes_its_bytes() -> None:
    a100 = TABLE.accelerator("A100")
    rates = Rates(a100, Kernels(), TABLE.constants)
    moved = a100.bandwidth * TABLE.constants.bandwidth
    assert optimizer_seconds(moved, rates) == pytest.approx(1)
