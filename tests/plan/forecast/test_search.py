"""A search: estimates from a few blocks agree with forecasts of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.plan.forecast.ask import ask, devices
from shardwise.plan.forecast.candidate import Candidate, candidates, savings
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.search import Planner, Question
from shardwise.plan.forecast.verdict import Verdict
from tests.plan.forecast.test_repeated import EACH_ALONE, decoder

BF16 = {"wrap": EACH_ALONE, "precision": Precision(param_dtype=torch.bfloat16)}


def inputs(rows: int) -> Any:
    return (torch.zeros(rows, 32, dtype=torch.int64),), {}


def question(ranks: int = 8, rows: int | None = None) -> Question:
    machine = known().machine("H100", min(8, ranks))
    return Question(decoder(), inputs, machine, ranks, rows, arguments=BF16)


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
def test_memory_and_time_of_all_blocks_follow_from_a_few(strategy: str, recompute: int) -> None:
    planner = Planner(question())
    candidate = Candidate(strategy, 4, recompute=recompute)
    (estimate,) = planner.estimates([candidate], lambda peak, in_host: True)
    whole = planner.forecast(candidate)
    assert estimate.peak == pytest.approx(whole.memory.peak, rel=0.02)
    assert estimate.seconds == pytest.approx(whole.time.seconds, rel=0.05)


def test_estimates_of_several_micro_batches_are_exact_at_each() -> None:
    planner = Planner(question())
    asked = [Candidate("full_shard", rows) for rows in (1, 2, 8)]
    estimates = planner.estimates(asked, lambda peak, in_host: False)
    for estimate in estimates:
        whole = planner.forecast(estimate.candidate).memory
        assert estimate.peak == pytest.approx(whole.peak, rel=0.02)
        assert estimate.seconds == float("inf")  # said not to fit


def test_candidates_are_of_the_machine() -> None:
    of_a_host = {candidate.strategy for candidate in candidates(8, 8, [1])}
    assert of_a_host == {"no_shard", "zero1", "shard_grad_op", "full_shard"}
    meshes = {candidate.mesh for candidate in candidates(32, 8, [1])}
    assert meshes == {None, (4, 8), (2, 16)}
    assert len(set(candidates(1024, 8, [1, 2, 4]))) > 1000


def test_every_saving_changes_one_thing() -> None:
    chosen = Candidate("shard_grad_op", 4)
    for change, other in savings(chosen):
        same = [vars(chosen)[name] == value for name, value in vars(other).items()]
        assert same.count(False) == 1, change


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return ask(question(rows=16), tokens=10**9)


def test_the_fastest_that_fits_is_found(verdict: Verdict) -> None:
    assert verdict.says == "fits"
    assert verdict.exit_code == 0
    rates = [other.time.tokens_per_second for other in verdict.others]
    assert rates == sorted(rates, reverse=True)
    assert verdict.best.time.tokens_per_second >= rates[0]
    assert verdict.first_line.startswith("FITS on 8 x H100")


def test_all_of_a_verdict_is_in_its_json(verdict: Verdict) -> None:
    said = verdict.as_json()
    assert said["peak"] == sum(said["by_kind"].values())
    assert said["seconds"] == pytest.approx(sum(said["parts"].values()))
    tokens = said["tokens_per_second"] * 8 * said["days"] * 86_400
    assert tokens == pytest.approx(10**9)


def on_a_device_of(memory: float) -> Question:
    asked = question()
    accelerator = replace(asked.machine.accelerator, memory=memory, reserved=0)
    return replace(asked, machine=replace(asked.machine, accelerator=accelerator))


@pytest.mark.parametrize(("memory", "status"), [(0.9, 2), (1.02, 3), (1.2, 0)])
def test_the_error_decides_what_is_promised(memory: float, status: int) -> None:
    chosen = Candidate("no_shard", 4)
    needed = Planner(question()).forecast(chosen).memory.peak
    verdict = ask(on_a_device_of(needed * memory), chosen, among=[Candidate("full_shard", 1)])
    assert verdict.exit_code == status
    assert bool(verdict.fixes) is (status != 0)
    assert all(fix.peak < needed for fix in verdict.fixes)
    assert ("one thing at a time" in str(verdict)) is (status != 0)


def test_where_nothing_fits_the_smallest_is_judged() -> None:
    among = [Candidate("no_shard", 4), Candidate("full_shard", 1, recompute=1)]
    verdict = ask(on_a_device_of(1000.0), among=among)
    assert verdict.says == "does not fit"
    assert verdict.best.candidate == among[1]


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 rows .* 8 ranks.*such as 16"):
        ask(question(rows=12))


def test_the_front_door_is_called_plan() -> None:
    import shardwise as sw

    with pytest.raises(ConfigError, match=r"nearest is 'H100"):
        sw.plan(decoder(), "8xH1000", inputs)


@pytest.mark.parametrize("text", ["H100", "0xH100", "xH100"])
def test_devices_without_a_number_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 8xH100"):
        devices(text)
