"""Which full buckets stay gathered: frozen ones for good, trained units within a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.plan import residency
from shardwise.plan.blueprint import draw_on
from shardwise.plan.draw import draw
from shardwise.plan.units import wrap as wrap_policies
from tests.copies import equal, error_text, on_ranks
from tests.nets import decoder, loss, mostly_frozen, mostly_frozen_batch
from tests.ranks import run_sharing, run_threads
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
@pytest.mark.parametrize("unsharded", [0, 20_000, ALL, "blocks.1"])
def test_what_stays_gathered_changes_no_value(strategy: str, unsharded: Any) -> None:
    given = 0 if strategy in ("no_shard", "zero1") else unsharded

    def rank(comm: Comm, model: nn.Module, kept: Any) -> dict[str, Tensor]:
        mesh: Any = {"mesh": (2, 2)} if "hybrid" in strategy else {}
        sharded = sw.shard(model, strategy, comm=comm, unsharded=kept, **mesh)
        run(sharded, 3)
        return sharded.model.state_dict()

    with_it = on_ranks(4, mostly_frozen, lambda comm, model: rank(comm, model, given))
    plain = on_ranks(4, mostly_frozen, lambda comm, model: rank(comm, model, 0))
    assert all(map(equal, with_it, plain))


@pytest.mark.parametrize(("strategy", "budget"), [("zero1", 0), ("full_shard", ALL)])
def test_frozen_parameters_are_gathered_once(strategy: str, budget: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[list[int], int, int]:
        sharded = sw.shard(model, strategy, comm=comm, unsharded=budget)
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
        sharded = sw.shard(model, comm=comm, unsharded=ALL)
        schedule = sharded.schedule
        return schedule.saved, sum(map(schedule.sent, schedule.plain)), run(sharded, 2)

    saved, plain, sent = on_ranks(2, decoder, rank)[0]
    whole = on_ranks(2, decoder, lambda comm, model: run(sw.shard(model, comm=comm), 2))[0]
    assert [less + saved for less in sent] == whole
    assert 0 < saved < plain


@pytest.mark.parametrize("how", ["state", "shard", "unfrozen", "gradient"])
def test_what_was_written_is_gathered_again(how: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[Tensor, Tensor]:
        sharded = sw.shard(model, "full_shard", comm=comm, unsharded=ALL)
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


def layers() -> nn.Sequential:
    """Units of 64, 128, 256 and 512 float32; the first two are frozen."""
    model = nn.Sequential(*(nn.Linear(8, 8 << size, bias=False) for size in range(4)))
    model[:2].requires_grad_(requires_grad=False)
    return model


def resident(
    unsharded: Any,
    precision: sw.Precision = sw.Precision(),  # noqa: B008
    model: nn.Module | None = None,
) -> set[str]:
    """The units that stay."""
    options = {"unsharded": unsharded, "precision": precision}
    blueprint = draw(model or layers(), wrap=sw.wrap.by_class(nn.Linear), **options)
    frozen = {spec.unit for spec in blueprint.buckets if spec.kept}
    stay = {spec.unit for spec in blueprint.buckets if not spec.placement.frees}
    assert not any(spec.kept and spec.trainable for spec in blueprint.buckets)
    return frozen | stay


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


def test_by_default_little_stays_where_a_second_gather_sends_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "KEPT_NBYTES", 768)
    wrap = sw.wrap.by_class(nn.Linear)
    assert resident(None) == {"0", "1"}
    assert resident(0) == set()
    alone = draw(layers(), wrap=wrap, ranks=(0, 1))
    messages = draw(layers(), wrap=wrap)
    shard = messages.grid.shard._replace(shared=True)
    rest = messages.device, messages.units, messages.placement, messages.options
    memory = draw_on(messages.grid._replace(shard=shard), *rest)
    assert not any(spec.kept for drawn in (alone, memory) for spec in drawn.buckets)


def test_a_model_that_stays_whole_by_default_is_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), {"ranks": (0, 1)}

    def units(**options: Any) -> int:
        return len(draw(model, **options).units)

    for limit, number in ((8 * 288, 1), (8 * 288 - 1, 8)):  # bytes, without padding
        monkeypatch.setattr(residency, "KEPT_NBYTES", limit)
        monkeypatch.setattr(wrap_policies, "JOINED_TRAINED_NBYTES", limit)
        assert (units(), units(strategy="shard_grad_op")) == (number, number)
        assert (units(offload="everything"), units(unsharded=0), units(**alone)) == (number, 8, 8)
        for dtype in (None, torch.float64):
            buckets = draw(model, precision=sw.Precision(param_dtype=dtype)).buckets
            assert {spec.placement.frees for spec in buckets} <= {number == 8, False}
            assert number == 8 or not any(spec.placement.frees for spec in buckets)


def test_ranks_that_share_memory_free_each_of_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "KEPT_NBYTES", 1 << 20)
    monkeypatch.setattr(wrap_policies, "JOINED_TRAINED_NBYTES", 1 << 20)

    def units(comm: Comm) -> int:
        return len(sw.shard(decoder(), comm=comm).units)

    assert run_threads(2, units)[0] == 1 < run_sharing(2, units)[0]


@pytest.mark.parametrize("strategy", ["no_shard", "zero1"])
def test_ranks_that_share_memory_join_half_as_much_of_what_stays(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrap_policies, "JOINED_TRAINED_NBYTES", 4 * 288)

    def units(comm: Comm) -> list[int]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        return [len(unit.modules) for unit in sw.shard(model, strategy, comm=comm).units]

    assert run_threads(2, units)[0] == [4, 4]
    assert run_sharing(2, units)[0] == [2, 2, 2, 2]


def test_where_everything_stays_a_budget_is_refused() -> None:
    with pytest.raises(sw.ConfigError, match="unsharded=8 has no effect: with zero1 all"):
        sw.shard(decoder(), "zero1", unsharded=8)
    assert error_text(sw.ConfigError, lambda: sw.shard(decoder(), unsharded=-1)) == (
        "unsharded is -1; it is a number of bytes, or 0."
    )


@pytest.mark.parametrize(
    ("named", "units"),
    [
        ("1", {"1"}),
        (["[02]", "3"], {"0", "2", "3"}),
        ("Linear", {"0", "1", "2", "3"}),
        ([nn.Linear], {"0", "1", "2", "3"}),
        ((), set()),
    ],
)
def test_units_stay_by_name_by_pattern_or_by_class(named: Any, units: set[str]) -> None:
    assert resident(named) == units


def test_what_no_unit_claims_is_named_as_it_is_printed() -> None:
    model = layers()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert resident("(root)", model=model) == {""}


def test_of_a_named_unit_frozen_buckets_stay_for_good_and_trained_ones_within_a_step() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[list[int], list[int]]:
        plain = run(sw.shard(model, comm=comm), 2)
        named = sw.shard(mostly_frozen(), comm=comm, unsharded=["blocks.0"])
        frozen, trained = (b.layout.numel * 4 // 2 for b in named.runtime.units["blocks.0"].buckets)
        assert not named.buckets[0].trainable
        return [n - p for n, p in zip(run(named, 2), plain, strict=True)], [
            -frozen - trained,
            -2 * frozen - trained,
        ]

    for less, expected in on_ranks(2, mostly_frozen, rank):
        assert less == expected


def test_a_unit_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert error_text(
        sw.ConfigError, lambda: sw.shard(decoder(), unsharded=["block.0"])
    ).startswith(
        "unsharded names 'block.0', which is neither the class nor the name of a unit that it "
        "can choose. Nearest first: blocks.0, "
    )


def test_the_earlier_name_is_answered_by_this_one() -> None:
    earlier: Any = {"residency": 8}
    assert error_text(sw.ConfigError, lambda: sw.shard(decoder(), **earlier)).startswith(
        "shard() has no option 'residency'; that is unsharded= here: bytes, or names of units."
    )
