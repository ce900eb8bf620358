"""Which full buckets stay gathered: frozen ones for good, trained units within a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.grid import Grid
from shardwise.comm.protocol import Comm
from shardwise.config.options import Options
from shardwise.config.strategies import placement_of
from shardwise.plan.residency import with_residency
from shardwise.plan.spec import specs_of
from shardwise.plan.units.units import choose_units
from tests.copies import equal, on_ranks, said
from tests.nets import decoder, loss, mostly_frozen, mostly_frozen_batch
from tests.steps import STRATEGIES

ALL = 1 << 30


def run(sharded: sw.Sharded, steps: int) -> list[int]:
    """The bytes that gathers send in each step."""
    trained = [param for param in sharded.model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    sent = []
    for step in range(steps):
        sharded.comm.counters.reset()
        loss(sharded.model, mostly_frozen_batch(10 * step + sharded.comm.rank, 2)).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(sharded.comm.counters.bytes_sent.get("gather", 0))
    return sent


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_shard", "hybrid_full"])
@pytest.mark.parametrize("residency", [0, 20_000, ALL])
def test_what_stays_gathered_changes_no_value(strategy: str, residency: int) -> None:
    budget = 0 if strategy in ("no_shard", "zero1") else residency

    def rank(comm: Comm, model: nn.Module, kept: int) -> dict[str, Tensor]:
        mesh: Any = {"mesh": (2, 2)} if "hybrid" in strategy else {}
        sharded = sw.shard(model, strategy, comm=comm, residency=kept, **mesh)
        run(sharded, 3)
        return sharded.model.state_dict()

    with_it = on_ranks(4, mostly_frozen, lambda comm, model: rank(comm, model, budget))
    plain = on_ranks(4, mostly_frozen, lambda comm, model: rank(comm, model, 0))
    assert all(map(equal, with_it, plain))


@pytest.mark.parametrize(("strategy", "residency"), [("zero1", 0), ("full_shard", ALL)])
def test_frozen_parameters_are_gathered_once(strategy: str, residency: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[list[int], int, int]:
        sharded = sw.shard(model, strategy, comm=comm, residency=residency)
        schedule, trained = sharded.schedule, 0
        for bucket in sharded.buckets:
            trained += bucket.layout.numel * 4 if bucket.trainable else 0
        gathers = [event for event in schedule.events if event.op == "gather"]
        assert sum(map(schedule.sent, gathers)) == trained // 2
        assert f"{schedule.saved / 1024:.1f} KiB less: some units stay unsharded" in str(schedule)
        return run(sharded, 3), trained // 2, sum(b.layout.numel * 2 for b in sharded.buckets)

    sent, trained, everything = on_ranks(2, mostly_frozen, rank)[0]
    assert sent == [everything, trained, trained]


def test_trained_units_are_gathered_once_in_a_step() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[int, int, list[int]]:
        sharded = sw.shard(model, comm=comm, residency=ALL)
        schedule = sharded.schedule
        return schedule.saved, sum(map(schedule.sent, schedule.plain)), run(sharded, 2)

    saved, plain, sent = on_ranks(2, decoder, rank)[0]
    whole = on_ranks(2, decoder, lambda comm, model: run(sw.shard(model, comm=comm), 2))[0]
    assert [less + saved for less in sent] == whole
    assert 0 < saved < plain


@pytest.mark.parametrize("how", ["state", "shard", "unfrozen", "gradient"])
def test_what_was_written_is_gathered_again(how: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[Tensor, Tensor]:
        sharded = sw.shard(model, "full_shard", comm=comm, residency=ALL)
        run(sharded, 1)
        param = model.get_parameter("blocks.0.attention.key.weight")
        if how == "state":
            sharded.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
        elif how == "shard":
            with torch.no_grad():
                param.data.mul_(2)
        elif how == "unfrozen":
            param.requires_grad_()
            for _ in range(2):
                run(sharded, 1)
        else:
            param.grad = torch.ones_like(param)
            torch.optim.SGD([param], lr=1.0).step()
        output = model(mostly_frozen_batch(0, 2)[0]).detach()
        with sharded.full_params():
            return output, model(mostly_frozen_batch(0, 2)[0]).detach()

    for output, expected in on_ranks(2, mostly_frozen, rank):
        assert torch.equal(output, expected)


def resident(budget: int, precision: sw.Precision = sw.Precision()) -> set[str]:  # noqa: B008
    """The units that stay: linear layers of 64, 128, 256, 512 float32; the first two are frozen."""
    model = nn.Sequential(*(nn.Linear(8, 8 << size, bias=False) for size in range(4)))
    model[:2].requires_grad_(requires_grad=False)
    placement, options = placement_of("full_shard"), Options(precision=precision)
    grid = Grid.of(0, 2, placement.splits)
    specs = {
        unit.name: specs_of(unit, options, grid, placement, 64)
        for unit in choose_units(model, sw.wrap.by_class(nn.Linear))
    }
    chosen = with_residency(specs, budget)
    assert chosen.keys() == specs.keys()
    kept = {spec.unit for buckets in chosen.values() for spec in buckets if spec.kept}
    stay = {unit for unit, [spec] in chosen.items() if not spec.placement.frees}
    assert not kept & {"2", "3"}
    return kept | stay


@pytest.mark.parametrize(
    ("budget", "units"),
    [
        (0, set()),
        (255, set()),
        (256, {"0"}),
        (511, {"0"}),
        (512, {"1"}),  # the largest that fits comes first
        (768, {"0", "1"}),
        (768 + 1023, {"0", "1"}),
        (768 + 1024, {"0", "1", "2"}),
        (768 + 2047, {"0", "1", "2"}),
        (768 + 2048, {"0", "1", "3"}),
        (768 + 2048 + 1024, {"0", "1", "2", "3"}),
    ],
)
def test_of_what_fits_frozen_buckets_stay_first_and_of_each_kind_the_largest(
    budget: int, units: set[str]
) -> None:
    assert resident(budget) == units
    assert resident(budget // 2, sw.Precision(param_dtype=torch.bfloat16)) == units


def test_where_everything_stays_a_budget_is_refused() -> None:
    with pytest.raises(sw.ConfigError, match="residency=8 has no effect: with zero1 all"):
        sw.shard(decoder(), "zero1", residency=8)
    assert said(sw.ConfigError, lambda: sw.shard(decoder(), residency=-1)) == (
        "residency is -1; it is a number of bytes, or 0."
    )
