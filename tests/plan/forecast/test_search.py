"""A search: estimates from a few blocks agree with forecasts of the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from shardwise.config.precision import Precision
from shardwise.config.strategies import STRATEGIES, placement_of
from shardwise.errors import ConfigError
from shardwise.plan.forecast.ask import ask, candidates_of, devices
from shardwise.plan.forecast.candidate import OFFLOADS, Candidate, candidates, savings
from shardwise.plan.forecast.fixes import shorter
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.planner import Planner
from shardwise.plan.forecast.question import Question
from shardwise.plan.forecast.search import fastest, smallest
from shardwise.plan.forecast.verdict import Verdict
from tests.plan.forecast.test_repeated import EACH_ALONE, decoder

BF16 = {"wrap": EACH_ALONE, "precision": Precision(param_dtype=torch.bfloat16)}


FURTHER = [pytest.param(name, marks=pytest.mark.prove) for name in STRATEGIES if name != "no_shard"]


def inputs(rows: int) -> Any:
    return (torch.zeros(rows, 32, dtype=torch.int64),), {}


def question(ranks: int = 8, rows: int | None = None) -> Question:
    machine = known().machine("H100", min(8, ranks))
    return Question(decoder(layers=9), inputs, machine, ranks, rows, arguments=BF16)


@pytest.mark.prove
@pytest.mark.parametrize("rows", [None, 64])
def test_the_fastest_come_first_though_most_are_not_estimated(rows: int | None) -> None:
    every = list(candidates(32, 8, [1, 2], wires=(None, "int8")))[::61]

    def with_less_in_host(candidate: Candidate) -> list[Candidate]:
        less = OFFLOADS[: OFFLOADS.index(candidate.offload)]
        return [other for other in every if other in {replace(candidate, offload=o) for o in less}]

    planner, limit = planner_of(32, rows), 2.2e6
    brute = {
        candidate: planner.seconds(candidate) / planner.question.rows_of(candidate)
        for candidate in every
        if planner.peak(candidate).device < limit
        and not any(planner.peak(other).device < limit for other in with_less_in_host(candidate))
    }
    assert 0 < len(brute) < len(every)
    planner.estimates = 0
    few = [*islice(fastest(planner, every, lambda peak: peak.device < limit), 5)]
    assert [seconds for _, seconds in few] == pytest.approx(sorted(brute.values())[:5])
    assert planner.estimates < len(brute)


class Counted(Planner):
    """Counts estimates."""

    estimates = 0

    def seconds(self, candidate: Candidate) -> float:
        self.estimates += 1
        return super().seconds(candidate)


@cache
def planner_of(ranks: int = 8, rows: int | None = None) -> Counted:
    """One for all tests: it observes the model once."""
    return Counted(question(ranks, rows))


@pytest.mark.parametrize("rows", [None, pytest.param(64, marks=pytest.mark.prove)])
def test_no_candidate_is_faster_than_was_thought_possible(rows: int | None) -> None:
    planner = planner_of(32, rows)
    for candidate in list(candidates(32, 8, [1, 2], wires=(None, "int8")))[::61]:
        least = planner.least(candidate)
        assert planner.computed(candidate) <= least * (1 + 1e-9)
        seconds = planner.seconds(candidate) * (1 + 1e-9)
        assert least <= seconds, candidate
        assert planner.seconds(replace(candidate, offload="none")) <= seconds, candidate
        if not placement_of(candidate.strategy).frees:
            assert planner.question.gathered <= planner.peak(candidate).device


def test_the_smallest_is_found_among_few() -> None:
    every = list(candidates(8, 8, [1, 4]))[::15]
    planner = planner_of()
    least = min(planner.peak(candidate).device for candidate in every)
    assert planner.peak(smallest(planner, every, lambda peak: peak.device)).device == least


def test_candidates_are_of_the_machine() -> None:
    of_a_host = {candidate.strategy for candidate in candidates(8, 8, [1])}
    assert of_a_host == {"no_shard", "zero1", "shard_grad_op", "full_shard"}
    meshes = {candidate.mesh for candidate in candidates(32, 8, [1])}
    assert meshes == {None, (4, 8), (2, 16)}
    wires = None, "float32", "int8"
    assert len(set(candidates(1024, 8, [2**n for n in range(7)], wires=wires))) > 10_000


def test_every_saving_changes_one_thing() -> None:
    for chosen in (Candidate("shard_grad_op", 4), Candidate("no_shard", 2, offload="everything")):
        changes = dict(savings(chosen))
        for change, other in changes.items():
            same = [vars(chosen)[name] == value for name, value in vars(other).items()]
            assert same.count(False) == 1, change
        assert len(changes) == len(list(savings(chosen)))
        offloads = {other.offload for other in changes.values()}
        assert offloads == set(OFFLOADS), "each strategy can offload"


@pytest.mark.parametrize("rows", [2, 5, 9, 12])
def test_fewer_rows_at_a_time_are_as_many_as_divide_the_step(rows: int) -> None:
    asked = question(8, 8 * rows)
    fewer = {other.micro_batch for _, other in savings(Candidate("full_shard", rows))} - {rows}
    assert fewer == {1, max(n for n in range(1, rows) if rows % n == 0)}
    for micro_batch in fewer:
        asked.check(Candidate("full_shard", micro_batch))


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return ask(question(rows=16), tokens=10**9)


def test_the_fastest_that_fits_is_found(verdict: Verdict) -> None:
    assert verdict.says == "fits"
    assert verdict.exit_code == 0
    rates = [other.time.tokens_per_second for other in verdict.others]
    assert rates == sorted(rates, reverse=True)
    assert verdict.best.time.tokens_per_second >= rates[0]
    assert verdict.first_line.startswith("FITS on 8 × H100")


def test_gradients_of_another_dtype_are_offered_but_not_chosen(verdict: Verdict) -> None:
    assert verdict.best.candidate.wire is None
    assert {other.candidate.wire for other in verdict.rounded} == {"float32", "int8"}
    assert "in other dtypes" in str(verdict)
    planner = planner_of()
    plain, narrow = (planner.forecast(Candidate("full_shard", 1, wire=w)) for w in (None, "int8"))
    assert narrow.time.seconds < plain.time.seconds


def test_all_of_a_verdict_is_in_its_json(verdict: Verdict) -> None:
    report = verdict.as_json()
    assert report["peak"] == sum(report["by_kind"].values())
    assert report["seconds"] == pytest.approx(sum(report["parts"].values()))
    tokens = report["tokens_per_second"] * 8 * report["days"] * 86_400
    assert tokens == pytest.approx(10**9)


def on_a_device_of(memory: float) -> Question:
    base = question()
    accelerator = replace(base.machine.accelerator, memory=memory, reserved=0)
    return replace(base, machine=replace(base.machine, accelerator=accelerator))


@pytest.mark.parametrize(
    ("memory", "status"),
    [
        pytest.param(0.9, 2, marks=pytest.mark.prove),
        (1.02, 3),
        pytest.param(1.2, 0, marks=pytest.mark.prove),
    ],
)
def test_the_error_decides_what_is_promised(memory: float, status: int) -> None:
    chosen = Candidate("no_shard", 4)
    peak = planner_of().forecast(chosen).memory.peak
    verdict = ask(on_a_device_of(peak * memory), chosen, among=[Candidate("full_shard", 1)])
    assert verdict.exit_code == status
    assert bool(verdict.fixes) is (status != 0)
    assert all(fix.peak < peak for fix in verdict.fixes)
    assert ("one thing at a time" in str(verdict)) is (status != 0)


@pytest.mark.parametrize("strategy", ["no_shard", *FURTHER])
def test_each_strategy_may_be_the_fastest(strategy: str) -> None:
    verdict = ask(question(rows=16), among=[Candidate(strategy, 1)])
    assert verdict.best.candidate.strategy == strategy


def test_where_nothing_fits_the_smallest_is_judged() -> None:
    among = [Candidate("no_shard", 4), Candidate("full_shard", 1, recompute=1)]
    verdict = ask(on_a_device_of(1000.0), among=among)
    assert verdict.says == "does not fit"
    assert verdict.best.candidate == among[1]


def test_the_least_number_of_ranks_that_fits_is_a_fix() -> None:
    among = [Candidate("full_shard", 1, recompute=1, offload=each) for each in OFFLOADS]
    base = on_a_device_of(1e12)
    twelve = Planner(replace(base, ranks=24)).forecast(among[0]).memory.peak
    tight = on_a_device_of(twelve * (1 + known().errors["memory"].middle) * 1.001)
    accelerator = replace(tight.machine.accelerator, host_memory=0.0)  # nothing can be offloaded
    tight = replace(tight, machine=replace(tight.machine, accelerator=accelerator))
    fixes = {fix.change: fix.fits for fix in ask(tight, among=among[:1]).fixes}
    assert fixes["24 ranks, 8 a host"]
    assert not any(fix.fits for fix in ask(on_a_device_of(1.0), among=among).fixes)


def test_rows_are_as_long_as_fits_and_a_model_that_cannot_be_so_is_no_fix() -> None:
    def refused() -> Question:
        raise ConfigError("it takes no adapter")

    chosen, base = Candidate("no_shard", 4), on_a_device_of(1e12)
    series = shorter(base, 32)
    third = Planner(series[3][1]()).forecast(chosen).memory.peak
    tight = on_a_device_of(third * (1 + known().errors["memory"].middle) * 1.001)
    further = [shorter(tight, 32), [("adapters", refused)], []]
    fixes = ask(tight, chosen, among=[Candidate("full_shard", 1)], further=further).fixes
    assert [fix.change for fix in fixes if fix.fits and "--seq" in fix.change] == [series[3][0]]
    assert "adapters" not in {fix.change for fix in fixes}
    fits = [fix.fits for fix in fixes]
    assert fits == sorted(fits, reverse=True)
    times = [fix.time for fix in fixes if fix.fits]
    assert times == sorted(times)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_may_send_in_other_dtypes_and_one_sends_nothing(ranks: int) -> None:
    wires = {c.wire for c in candidates_of(question(ranks))}
    assert wires == ({None} if ranks == 1 else {None, "float32", "int8"})


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 rows .* 8 ranks.*such as 16"):
        ask(question(rows=12))


@pytest.mark.parametrize(
    ("machine", "options", "fact"),
    [
        ("8xH1000", {}, "nearest is 'H100"),
        ("8xH100", {"optimizer": "adam"}, "choose one of 'adamw', "),
        ("8xH100", {"hosts": 0}, "hosts is 0; it is a number from 1 on"),
    ],
)
def test_the_entry_point_is_called_plan(machine: str, options: dict[str, Any], fact: str) -> None:
    import shardwise as sw

    with pytest.raises(ConfigError, match=fact):
        sw.plan(decoder(), machine, inputs, **options)


def test_a_plan_without_machine_or_inputs_says_what_to_write() -> None:
    import shardwise as sw

    with pytest.raises(ConfigError, match="such as 8xH100"):
        sw.plan(decoder())
    with pytest.raises(ConfigError, match="what the model is called with is not known") as caught:
        sw.plan(decoder(), "2xH100")
    line = str(caught.value).split("2,048: ")[1].removesuffix(".")
    (ids,), words = eval(line.split('"2xH100", ')[1].removesuffix(")"))(3)
    assert (ids.shape, words) == ((3, 2048), {})


@pytest.mark.parametrize("text", ["H100", "0xH100", "xH100"])
def test_devices_without_a_number_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 8xH100"):
        devices(text)


def with_host_memory(nbytes: float) -> Question:
    base = question(8)
    accelerator = replace(base.machine.accelerator, host_memory=nbytes)
    return replace(base, machine=replace(base.machine, accelerator=accelerator))


@pytest.mark.parametrize(("part", "status"), [(0.9, 2), (1.02, 3), (1.2, 0)])
def test_host_memory_decides_as_the_device_s_does(part: float, status: int) -> None:
    chosen = Candidate("full_shard", 1, offload="everything")
    needed = 8 * planner_of().forecast(chosen).memory.in_host
    verdict = ask(with_host_memory(part * needed), chosen, among=[Candidate("full_shard", 1)])
    assert verdict.exit_code == status
    assert "in host memory of" in verdict.first_line  # the device is emptier
    fits = [fix.change for fix in verdict.fixes if fix.fits]
    assert ("offload nothing" in fits) is (status != 0)


def test_where_nothing_fits_neither_device_nor_host_is_overlooked() -> None:
    among = [Candidate("full_shard", 1, offload=offload) for offload in OFFLOADS]
    base = with_host_memory(1000.0)
    device = planner_of().forecast(among[0]).memory.peak + base.machine.accelerator.reserved
    accelerator = replace(base.machine.accelerator, memory=device * 1.01)
    verdict = ask(
        replace(base, machine=replace(base.machine, accelerator=accelerator)), among=among
    )
    assert verdict.best.candidate.offload == "none"
    assert verdict.says == "within the error"


def test_what_a_cpu_offloads_stays_in_its_own_memory() -> None:
    base = with_host_memory(1e12)
    accelerator = replace(base.machine.accelerator, device="cpu", reserved=0)
    asked = replace(base, machine=replace(base.machine, accelerator=accelerator))
    planner, chosen = Planner(asked), Candidate("full_shard", 1, offload="everything")
    peak, memory = planner.peak(chosen), planner.forecast(chosen).memory
    assert memory.held(accelerator) == memory.peak + memory.in_host
    assert peak.device == pytest.approx(memory.held(accelerator), rel=0.02)
    assert peak.in_host == 0
    verdict = ask(asked, chosen, among=[chosen])
    report = verdict.as_json()
    assert (report["held"], report["in_host"]) == (memory.held(accelerator), 0)
    assert "offloaded  " in str(verdict)
    assert "freed and kept" not in str(verdict)
