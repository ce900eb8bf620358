"""The step benchmark on a tiny model: every engine, every part, and the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.harness.report import Cell, Report
from benchmarks.harness.workers import on_ranks
from benchmarks.models import ON_CPU
from benchmarks.programs import PROGRAMS
from benchmarks.step import engines, host
from benchmarks.step.engines import ENGINES, PLAIN, WHEN_NAMED, Setup, absent
from benchmarks.step.measure import CHECKED, Lap, Measured, check_losses, measure, peak_memory
from benchmarks.step.programs import COLUMNS, program_row
from benchmarks.step.run import Config, run, times, traffic
from benchmarks.step.traffic import PARTS, CopiedBytes, least_bytes

HERE = [name for name in ENGINES if not absent(name) and name not in WHEN_NAMED]
Ranks = list[dict[str, Measured]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Every engine, two rounds, two ranks; the losses are compared on the way."""
    return on_ranks(2, measure, Setup("tiny"), HERE, 2)


# ---- one run -------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.spawn
def test_every_engine_trains_the_same(ranks: Ranks) -> None:
    losses = {name: each.losses for name, each in ranks[0].items()}
    assert list(losses) == HERE
    assert all(len(each) == CHECKED for each in losses.values())
    assert [each[0] for each in losses.values()] == pytest.approx([losses["ddp"][0]] * len(losses))
    assert losses["full_shard"] == pytest.approx(losses["fsdp2"], rel=1e-5)
    assert losses[PLAIN][1] != losses["ddp"][1]  # it trains alone


@pytest.mark.spawn
def test_the_kernel_and_our_counters_agree_on_what_was_sent(ranks: Ranks) -> None:
    model = ON_CPU["tiny"].build()
    for name, each in ranks[0].items():
        if each.counted is None:
            continue
        heads = 4_096  # of messages
        carried = 0 if name.endswith("_memory") else each.counted
        assert carried <= each.sent <= carried + heads
        assert each.counted <= 1.01 * least_bytes(name, model, world=2)


@pytest.mark.spawn
def test_the_table_has_a_row_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    logged = list[str]()
    config = Config(
        model=("tiny",),
        engines=("full_shard", "fsdp2", "deepspeed_zero3"),
        rounds=2,
        part=("time",),
    )
    (report,) = run(config, logged.append)
    assert logged == ["tiny, 2 ranks, 2 rounds: plain, full_shard, fsdp2"]
    assert column(report, "engine") == [PLAIN, "full_shard", "fsdp2"]
    assert column(report, "× plain")[0] == 1.0
    text = "\n".join(report.lines())
    assert "optimizer: adamw, torch's fused kernel" in text
    assert "tiny, 2 ranks: decoder, 2 layers" in text
    assert "deepspeed_zero3: absent, deepspeed is not installed" in text
    assert "MiB peak" not in [each.name for each in report.tables[0].columns]


def column(report: Report, name: str) -> list[Cell]:
    (table,) = report.tables
    index = [each.name for each in table.columns].index(name)
    return [row[index] for row in table.rows]


@pytest.mark.spawn
def test_memory_is_watched_while_ranks_train() -> None:
    peak, start, seconds = peak_memory("full_shard", Setup("tiny"), world=2)
    assert peak > start > 10 * 2**20
    assert 0 < seconds < 60


@pytest.mark.prove
@pytest.mark.spawn
def test_host_time_and_the_optimizer_are_measured_in_their_variants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "PARAMS", (1, 3))
    hosts = host.host_table(["fsdp2"], 2, lambda _: None).rows
    assert [row[:2] for row in hosts] == [("fsdp2", 1), ("fsdp2", 3)]
    updates = host.update_table(["full_shard"], 2, lambda _: None).rows
    assert [row[1] for row in updates] == ["default", "foreach", "fused", "flat"]
    for row in (*hosts, *updates):
        assert all(isinstance(number, float | int) and number > 0 for number in row[2:])


@pytest.mark.spawn
def test_a_profile_names_what_the_engine_calls() -> None:
    config = Config(model=("tiny",), engines=("full_shard",), part=("profile",), steps=2)
    (report,) = run(config, lambda _: None)
    assert any("shardwise/" in line for line in report.lines())


# ---- the pieces ----------------------------------------------------------------------------


def test_a_rival_that_is_not_installed_is_reported_as_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert absent("deepspeed_zero2").startswith("deepspeed is not installed")
    assert absent("fsdp2") == absent("full_shard") == ""


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
    assert times("ddp", ranks) == {
        "× plain": 2.0,
        "q1": 1.75,
        "q3": 2.0,
        "min ×": 2.0,
        "ms": 4000.0,
        "min ms": 4000.0,
        "compute": 3000.0,
        "update": 1000.0,
    }


def test_copies_are_those_beyond_the_plain_step() -> None:
    plain = Measured([], [], sent=0, counted=None, copied=30)
    ranks = [
        {PLAIN: plain, "full_shard": replace(plain, sent=7, counted=6, copied=50)},
        {PLAIN: plain, "full_shard": replace(plain, sent=9, counted=6, copied=40)},
    ]
    assert traffic("full_shard", ranks, least=8) == {
        "MB sent": 9e-6,
        "least": 8e-6,
        "sent ÷": 9 / 8,
        "MB copied": 20e-6,
    }


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


@pytest.mark.parametrize("name", ON_CPU)
def test_the_same_generator_gives_the_same_batch(name: str) -> None:
    first, second = (ON_CPU[name].batch(torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.prove
@pytest.mark.spawn
def test_a_program_has_ddps_time_and_each_strategy_over_it() -> None:
    summary, *numbers = program_row("blocks", "torch", 2, 2)
    assert summary == PROGRAMS["blocks"].summary
    assert len(numbers) == len(COLUMNS) - 1
    assert all(isinstance(number, float) and number > 0 for number in numbers)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "adapters"])
def test_a_program_trains(name: str) -> None:
    task = PROGRAMS[name]
    model, batch = task.build(), task.batch(torch.Generator().manual_seed(0))
    task.loss(model, batch).backward()
    assert all(param.grad is not None for param in model.parameters())
