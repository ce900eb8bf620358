"""The plan of a run beside what ran: the runtime does what was planned, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.forecast.machine import known
from shardwise.recipe.recipe import Recipe
from shardwise.train import foresight
from shardwise.train.comparison import Compared
from shardwise.train.foresight import (
    USUAL,
    Foresight,
    Here,
    compared,
    machine_here,
    refusal,
    seconds_of,
)
from shardwise.train.records import Warned
from shardwise.train.requests import Request, SignalRequests
from shardwise.train.validation import Validation
from tests.cli.test_bench import HERE
from tests.report.runs import EVENTS
from tests.train.runs import Watched
from tests.train.tiny import tiny_recipe

SHORT = ("sample.tokens=0", "run.eval_rows=2", "run.plan=true", "run.steps=2", "run.eval_every=2")
THREE, FREED, PIECES = ("batch.micro=1",), ("sharding.unsharded=0",), ("sharding.mesh=[2,1]",)
SYNC = "sharding.sync_each_micro_batch=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "one micro-batch": ("batch.micro=6",),
    "several micro-batches of what stays gathered": ("batch.micro=2", "sharding.strategy=zero1"),
    "no prefetch": ("batch.micro=3", "sharding.prefetch.forward=0", "sharding.prefetch.backward=0"),
    "units that stay": ("batch.micro=3", "sharding.unsharded=20000"),
    "recomputed": ("batch.micro=6", "sharding.activation_checkpointing=2"),
    "in host memory": ("batch.micro=6", "sharding.offload=everything"),
    "loaded for the first of several": ("sharding.offload=optimizer", *THREE, *FREED),
    "joined for the first of several": ("sharding.strategy=hybrid_full", *PIECES, *THREE, *FREED),
    "reduced in each of three": (SYNC, *THREE),
    "means added to those before": (SYNC, *THREE, "sharding.strategy=no_shard"),
    "bf16": ("batch.micro=6", "sharding.precision=bf16", "sharding.strategy=shard_grad_op"),
}
QUICK = ("no prefetch", "units that stay", "recomputed", "bf16", "means added to those before")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize(
    "setting", [s if s in QUICK else pytest.param(s, marks=pytest.mark.prove) for s in SETTINGS]
)
def test_the_engine_holds_the_planned_bytes_at_every_event(
    watched: Watched, tmp_path: Path, setting: str
) -> None:
    recipe = tiny_recipe(tmp_path, *SHORT, "run.throughput_warmup=2", *SETTINGS[setting])
    watched.run(recipe, world=2)
    (comparison,) = watched.kind(Compared)
    assert comparison.differs == ""
    step = json.loads((Path(recipe.run.folder) / "step.json").read_text("utf-8"))
    events = [event for *_, event in step["moments"] if event is not None]
    assert len(events) == comparison.events == len(step["planned"]) - 2
    assert comparison.planned_memory >= max(engine or 0 for engine, _ in step["planned"])


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_so_it_does_with_state_of_8_bits_whose_tables_all_units_share(
    watched: Watched, tmp_path: Path, offload: str
) -> None:
    pytest.importorskip("bitsandbytes")
    large = ("model.width=64", "model.hidden=96", "optimizer.name=adamw_8bit")
    recipe = tiny_recipe(
        tmp_path, *SHORT, *large, "run.throughput_warmup=2", f"sharding.offload={offload}"
    )
    watched.run(recipe, world=2)
    (comparison,) = watched.kind(Compared)
    assert comparison.differs == ""


@pytest.mark.parametrize("ends", ["by patience", "on request"])
def test_a_run_that_ends_early_is_compared_all_the_same(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    early = ("run.steps=9", "run.eval_every=1", "run.throughput_warmup=2", "run.patience=1")
    if ends == "by patience":
        evaluate = Validation.evaluate
        no_better = lambda *given: replace(evaluate(*given), loss=3.0)  # noqa: E731
        monkeypatch.setattr(Validation, "evaluate", no_better)
    else:
        at_2 = lambda _, step: Request.STOP if step == 2 else Request.NONE  # noqa: E731
        monkeypatch.setattr(SignalRequests, "take", at_2)
    outcome = watched.run(tiny_recipe(tmp_path, *SHORT, *early), world=2)
    assert (outcome.step, outcome.stopped) == (2, ends == "on request")
    (comparison,) = watched.kind(Compared)
    assert comparison.events


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_so_it_does_where_parts_of_three_ranks_are_received(
    watched: Watched, tmp_path: Path, precision: str
) -> None:
    recipe = tiny_recipe(
        tmp_path,
        *SHORT,
        "batch.micro=4",
        "run.throughput_warmup=2",
        f"sharding.precision={precision}",
    )
    plan, step, rate = given_to_compare(watched, recipe, world=3)
    assert any(each.most[Kind.COMMUNICATION] for each in plan.engine)
    assert compared(plan, step, rate).differs == ""
    step["moments"][-2][1][0] += 8
    assert "bytes planned" in (compared(plan, step, rate).differs or "")


def given_to_compare(
    watched: Watched, recipe: Recipe, options: Foresight = USUAL, world: int = 1
) -> Any:
    """The plan, the recorded step and the rate that a run compares."""
    calls = list[Any]()

    def noted(*arguments: Any) -> Compared:
        calls.append(arguments)
        return compared(*arguments)

    watched.monkeypatch.setattr("shardwise.train.loop.compared", noted)
    watched.run(recipe, world=world, foresight=options)
    return calls[0]


def test_another_event_and_other_bytes_are_named(watched: Watched, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *SHORT, "batch.micro=6", "run.throughput_warmup=2")
    plan, step, rate = given_to_compare(watched, recipe)
    number = next(n for n, (*_, event) in enumerate(step["moments"]) if event)
    more = json.loads(json.dumps(step))
    more["moments"][number][1][0] += 8
    assert "bytes planned" in (compared(plan, more, rate).differs or "")
    more["moments"][number][2][1] = "another"
    more["planned"] = plan.beside(more["moments"])
    assert (compared(plan, more, rate).differs or "").endswith("was not planned")
    del step["moments"][-2], step["planned"][-2]
    assert (compared(plan, step, rate).differs or "").endswith("was planned, and not done")


def test_what_cannot_fit_is_refused_unless_it_is_forced(watched: Watched, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *SHORT, "batch.micro=6")
    watched.monkeypatch.setattr(foresight, "memory_of", lambda device: 200_000)
    with pytest.raises(ConfigError, match=r"planned to take .* has 195.3 KiB.*--force"):
        watched.run(recipe, world=1)
    assert not Path(recipe.run.folder).exists() or not list(Path(recipe.run.folder).glob("*.yaml"))
    watched.run(recipe, world=1, foresight=Foresight(force=True))
    assert any("--force" in warned.message for warned in watched.kind(Warned))


def test_what_cannot_fit_in_host_memory_is_refused_on_accelerators(
    watched: Watched, tmp_path: Path
) -> None:
    plan, *_ = given_to_compare(watched, tiny_recipe(tmp_path, *SHORT, "batch.micro=6"))
    l4 = replace(plan, here=Here(known().machine("L4", 8), timed=True), ranks=16)
    moments = tuple(replace(moment, in_host=2**30) for moment in plan.memory.moments)
    offloaded = replace(l4, memory=replace(plan.memory, moments=moments))
    assert refusal(offloaded, 24e9, 8 * 2**30) == ""
    said = refusal(offloaded, 24e9, 8 * 2**30 - 1)
    assert "take 8.0 GiB, 1.0 GiB on each of 8 ranks, in host memory, and this host has 8.0" in said
    assert "and this cuda has" in refusal(offloaded, 1e6, 0)
    assert refusal(l4, 24e9, 0) == ""  # nothing is offloaded


def test_a_refusal_counts_what_is_reserved_for_each_rank(watched: Watched, tmp_path: Path) -> None:
    plan, *_ = given_to_compare(watched, tiny_recipe(tmp_path, *SHORT, "batch.micro=6"))
    cpu = replace(plan.here.machine.accelerator, reserved=2**30 - plan.peak)
    machine = replace(plan.here.machine, accelerator=cpu, per_host=2)
    said = refusal(replace(plan, here=Here(machine, timed=True), ranks=2), 2**30, 0)
    assert "take 2.0 GiB, 1.0 GiB on each of 2 ranks, of which" in said


def test_a_refusal_counts_a_process_as_a_plan_does(watched: Watched, tmp_path: Path) -> None:
    plan, *_ = given_to_compare(watched, tiny_recipe(tmp_path, *SHORT, "batch.micro=6"))
    cpu = replace(plan.here.machine.accelerator, kept=0.5, reserved=0)
    here = Here(replace(plan.here.machine, accelerator=cpu), timed=True)
    held = plan.memory.held(cpu)
    assert held == plan.memory.process(0.5) > plan.peak
    assert refusal(replace(plan, here=here), held, 0) == ""
    assert "would be killed" in refusal(replace(plan, here=here), held - 1, 0)


def test_a_model_that_cannot_run_without_values_trains_without_a_plan(
    watched: Watched, tmp_path: Path
) -> None:
    def stopped(*_: object) -> None:
        raise ValueError("its attention has no such kernel")

    watched.monkeypatch.setattr(foresight, "plan_of", stopped)
    outcome = watched.run(tiny_recipe(tmp_path, *SHORT, "batch.micro=6"), world=2)
    assert outcome.step == 2
    assert Warned("the run has no plan: its attention has no such kernel") in watched.records
    assert watched.kind(Compared) == []


def test_the_term_that_is_off_is_named(watched: Watched, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *SHORT, "batch.micro=6", "run.throughput_warmup=2")
    (tmp_path / "here.toml").write_text(HERE)
    options = Foresight(machines=tmp_path / "here.toml")
    plan, step, _ = given_to_compare(watched, recipe, options)
    planned = plan.time.tokens_per_second
    large = [[s, [n * 100 for n in nbytes], event] for s, nbytes, event in step["moments"]]
    comparison = compared(plan, {**step, "moments": large}, planned / 2)
    assert comparison.mfu == pytest.approx((comparison.planned_mfu or 0) / 2, rel=0.01)
    memory, time = comparison.off
    assert memory.startswith("memory by activations and others: ")
    assert time.startswith("time by ")
    assert compared(plan, None, planned).off == ()


def test_seconds_are_those_up_to_each_event() -> None:
    seconds = seconds_of(EVENTS)
    assert seconds["forward"] == pytest.approx(0.05)
    assert seconds["backward"] == pytest.approx(0.06)
    assert seconds["update"] == pytest.approx(0.04)


def test_a_machine_without_an_entry_has_its_memory_alone() -> None:
    here = machine_here(torch.device("cpu"), 5e9, None)
    assert not here.timed
    assert here.machine.accelerator.memory == 5e9
