"""The harness itself, on a tiny model: every engine, every part, the report and its files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.harness.machine import this_machine
from benchmarks.step import engines, table
from benchmarks.step.engines import ENGINES, PLAIN, Setup, absent
from benchmarks.step.host import host_time, update_time
from benchmarks.step.measure import CHECKED, Lap, Measured, check_losses
from benchmarks.step.memory import peak_memory
from benchmarks.step.models import TASKS
from benchmarks.step.profile import profile_host
from benchmarks.step.report import Report, Row, Times, times_of, traffic_of
from benchmarks.step.run import Config, run
from benchmarks.step.traffic import PARTS, CopiedBytes, least_bytes

SENDS_THE_LEAST = {"no_shard", "zero1", "shard_grad_op", "full_shard", "ddp"}


@pytest.fixture(scope="module")
def report() -> Report:
    """Every engine, two rounds, two ranks; the losses are compared on the way."""
    logged, saved = list[str](), list[Report]()
    config = Config(models=("tiny",), rounds=2, parts=("time",))
    report = run(config, logged.append, saved.append)
    assert saved[-1] == report
    assert logged[0].startswith("tiny, 2 ranks, 2 rounds: plain, no_shard")
    return report


# ---- one run -------------------------------------------------------------------------------


@pytest.mark.spawn
def test_every_engine_has_a_row_with_numbers_or_a_reason(report: Report) -> None:
    assert [row.engine for row in report.rows] == list(ENGINES)
    for row in report.rows:
        assert bool(row.absent) == (row.times is None) == (row.traffic is None)
        assert bool(row.absent) == bool(absent(row.engine))


@pytest.mark.spawn
def test_every_engine_trains_the_same(report: Report) -> None:
    losses = {row.engine: row.losses for row in report.rows if not row.absent}
    assert all(len(each) == CHECKED for each in losses.values())
    assert [each[0] for each in losses.values()] == pytest.approx([losses["ddp"][0]] * len(losses))
    assert losses["full_shard"] == pytest.approx(losses["fsdp2"], abs=1e-5)
    assert losses[PLAIN][1] != losses["ddp"][1]  # it trains alone


@pytest.mark.spawn
def test_with_a_fused_optimizer_every_engine_trains_the_same_too() -> None:
    """Its kernel rounds otherwise; the run would stop if losses differed by more than that."""
    names = ("full_shard", "no_shard", "ddp", "fsdp1", "fsdp2")
    config = Config(
        models=("tiny",), rounds=2, engines=names, parts=("time",), optimizer="sgd_fused"
    )
    report = run(config, lambda _: None, lambda _: None)
    assert {row.engine for row in report.rows if row.losses} == {PLAIN, *names}
    assert "optimizer: sgd, torch's fused kernel" in "\n".join(table.lines(report))


@pytest.mark.spawn
def test_the_kernel_and_our_counters_agree_on_what_was_sent(report: Report) -> None:
    for row in report.rows:
        if row.traffic is None or row.traffic.counted is None:
            continue
        heads = 4_096  # of messages
        carried = 0 if row.engine.endswith("_memory") else row.traffic.counted
        assert carried <= row.traffic.sent <= carried + heads
        assert row.traffic.counted <= 1.01 * row.traffic.least


@pytest.mark.spawn
def test_the_table_and_the_picture_have_each_engine(report: Report) -> None:
    text = "\n".join(table.lines(report))
    for row in report.rows:
        assert f"\n{row.engine}" in text
    assert "tiny, 2 ranks: decoder, 2 layers" in text
    (bars,) = table.bars(report).values()
    assert {bar.label for bar in bars} == {row.engine for row in report.rows if row.times}
    assert [bar.value for bar in bars] == sorted(bar.value for bar in bars)


@pytest.mark.spawn
def test_memory_is_watched_while_ranks_train() -> None:
    memory = peak_memory("full_shard", Setup("tiny"), world=2, steps=3)
    assert memory.samples > 0
    assert memory.peak > memory.start > 10 * 2**20


@pytest.mark.spawn
def test_host_time_is_measured_for_each_number_of_parameters() -> None:
    hosts = host_time("fsdp2", (1, 3), steps=2)
    assert [(host.engine, host.params) for host in hosts] == [("fsdp2", 1), ("fsdp2", 3)]
    assert all(host.least > 0 and host.plain > 0 for host in hosts)


@pytest.mark.spawn
def test_the_optimizer_is_timed_in_its_variants() -> None:
    updates = update_time("full_shard", steps=2)
    assert [update.variant for update in updates] == ["default", "foreach", "fused", "flat"]
    assert all(0 < update.least <= update.median for update in updates)


@pytest.mark.spawn
def test_a_profile_names_what_the_engine_calls() -> None:
    assert "shardwise/" in profile_host("full_shard", 2, 1)


# ---- the pieces ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_fused_optimizers_have_the_options_of_the_others(kind: str) -> None:
    model = nn.Linear(2, 2)
    loop, fast = (
        engines.optimizer_for(model.parameters(), name) for name in (kind, f"{kind}_fused")
    )
    flat = engines.flat_optimizer_for(sw.shard(nn.Linear(2, 2)), f"{kind}_fused")
    assert isinstance(flat, sw.optim.AdamW if kind == "adamw" else sw.optim.SGD)
    assert fast.defaults == {**loop.defaults, "fused": True}
    assert flat.defaults == {name: loop.defaults[name] for name in flat.defaults}


def test_a_rival_that_is_not_installed_is_reported_as_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert absent("deepspeed_zero2").startswith("deepspeed is not installed")
    assert absent("fsdp2") == absent("full_shard") == ""
    row = Row("tiny", 2, "deepspeed_zero2", absent=absent("deepspeed_zero2"))
    report = Report(this_machine(), "adamw", (Row("tiny", 2, PLAIN), row))
    assert f"deepspeed_zero2: absent, {row.absent}" in table.lines(report)


def test_losses_that_differ_stop_the_run() -> None:
    check_losses("ddp", [4.0, 3.0], [4.0, 3.00002], "tiny")
    with pytest.raises(RuntimeError, match="fsdp2 on tiny: losses"):
        check_losses("fsdp2", [4.0, 3.0], [4.0, 3.001], "tiny")


def test_of_the_plain_step_only_the_first_loss_must_agree() -> None:
    check_losses(PLAIN, [4.0, 3.0], [4.0, 2.0], "tiny")
    with pytest.raises(RuntimeError, match="plain on tiny"):
        check_losses(PLAIN, [4.1, 3.0], [4.0, 3.0], "tiny")


def test_a_step_is_as_slow_as_its_slowest_rank_and_compared_within_its_round() -> None:
    def measured(*laps: tuple[float, float]) -> Measured:
        return Measured([], [Lap(*lap) for lap in laps], sent=0, counted=None, copied=0)

    ranks = [
        {PLAIN: measured((1, 1), (2, 2), (1, 1)), "ddp": measured((2, 1), (5, 1), (3, 1))},
        {PLAIN: measured((1, 0), (1, 1), (1, 1)), "ddp": measured((2, 2), (1, 1), (1, 1))},
    ]
    # plain 2, 4, 2 and ddp 4, 6, 4, so quotients are 2, 1.5, 2
    assert times_of("ddp", ranks) == Times(
        ratio=2.0,
        low=1.75,
        high=2.0,
        least_ratio=2.0,
        median=4000.0,
        least=4000.0,
        compute=3000.0,
        update=1000.0,
        rounds=3,
    )


def test_copies_are_those_beyond_the_plain_step() -> None:
    plain = Measured([], [], sent=0, counted=None, copied=30)
    ranks = [
        {PLAIN: plain, "full_shard": replace(plain, sent=7, counted=6, copied=50)},
        {PLAIN: plain, "full_shard": replace(plain, sent=9, counted=6, copied=40)},
    ]
    traffic = traffic_of("full_shard", ranks, least=8, params=100)
    assert (traffic.sent, traffic.counted, traffic.copied) == (9, 6, 20)


@pytest.mark.parametrize(
    ("engine", "numels"),
    [
        ("plain", 0),
        ("ddp", 2 * 10),
        ("zero1", 2 * 10),
        ("shard_grad_op", 100 + 10),
        ("full_shard", 2 * 100 + 10),
    ],
)
def test_the_least_that_must_be_sent_of_100_parameters_of_which_10_are_trained(
    engine: str, numels: int
) -> None:
    frozen = nn.Linear(9, 10, bias=False).requires_grad_(requires_grad=False)
    model = nn.ModuleList([frozen, nn.Linear(10, 1, bias=False)])
    assert least_bytes(engine, model, world=4) == 0.75 * 4 * numels


def test_every_engine_has_a_lower_bound() -> None:
    assert list(PARTS) == list(ENGINES)


def test_copies_are_counted_where_they_are_made_and_sums_are_not() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    with CopiedBytes() as copies:
        a.copy_(b)  # 12 bytes
        torch.cat((a, b))  # 24
        a.add_(b)
        torch.add(a, b, out=b)
    assert copies.nbytes == 36


@pytest.mark.parametrize("name", TASKS)
def test_the_same_generator_gives_the_same_batch(name: str) -> None:
    first, second = (TASKS[name].batch(torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
