"""Two axes at once: a row of the grid shards the model, and each row has a copy.

Gradients are summed over a row and then over the copies, so the reference adds them up in that
order: then all bits are equal. What the optimizer makes of them is compared with one axis, whose
sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.plan.units.units import Units
from tests import nets
from tests.copies import assert_near, clones, equal, error_text, local, on_ranks, seeded
from tests.parity.plain import OPTIMIZERS
from tests.ranks import run_hosts, run_threads
from tests.steps import Recorder, averaged, train

GRIDS = [(2, 2), (2, 3), (3, 2)]
BOTH = ("shard", "replicate")
MIXTURES: dict[str, str | Placement] = {
    "hybrid_shard": "hybrid_shard",
    "hybrid_shard_zero2": "hybrid_shard_zero2",
    "hybrid_full": "hybrid_full",
    "zero1 in rows": Placement("mine", (), (), ("shard",), hybrid=True),
    "zero1 over both": Placement("mine", (), (), BOTH, hybrid=True),
    "zero2 over both": Placement("mine", (), ("shard",), BOTH, hybrid=True),
}


def mixtures(*proved: str) -> list[Any]:
    """Their names; those that are ``proved`` are run by ``make prove`` only."""
    return [
        pytest.param(name, marks=pytest.mark.prove if name in proved else ()) for name in MIXTURES
    ]


NAMES = mixtures("zero1 in rows", "zero2 over both")


def batches(step: int, world: int) -> list[Any]:
    return [nets.decoder_batch(world * step + rank, 2) for rank in range(world)]


def trained(sharded: sw.Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Two steps of two micro-batches each, clipped."""
    comm = sharded.comm
    for step in range(4):
        last = step % 2 == 1
        with sharded.accumulate(last=last):
            train(sharded.model, batches(step, comm.size)[comm.rank])
        if last:
            sharded.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    return clones(sharded.model.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("mixture", NAMES)
def test_every_mixture_trains_as_one_axis_does(
    mixture: str, grid: tuple[int, int], optimizer: str
) -> None:
    make: Any = OPTIMIZERS[optimizer]
    settings = {"eps": 1e-4} if optimizer == "adamw" else {}

    def one_axis(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        return trained(sw.shard(model, comm=comm), make(model.parameters(), **settings))

    def hybrid(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, MIXTURES[mixture], comm=comm, mesh=grid)
        return trained(sharded, make(model.parameters(), **settings))

    world = grid[0] * grid[1]
    [expected, *_] = on_ranks(world, nets.decoder, one_axis)
    states = on_ranks(world, nets.decoder, hybrid)
    assert all(equal(states[0], other) for other in states)
    for name, value in expected.items():
        largest = value.abs().max()
        assert (states[0][name] - value).abs().max() <= 2e-5 * largest, name


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("mixture", NAMES)
def test_gradients_are_summed_over_rows_and_then_over_copies(
    mixture: str, grid: tuple[int, int]
) -> None:
    copies, shards = grid

    def gradients(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, MIXTURES[mixture], comm=comm, mesh=grid)
        train(model, batches(0, comm.size)[comm.rank])
        with sharded.full_params():
            return clones({name: local(param.grad) for name, param in model.named_parameters()})

    def expected(model: nn.Module) -> dict[str, Any]:
        every = batches(0, copies * shards)
        rows = [
            averaged(model, train, every[row * shards : (row + 1) * shards])
            for row in range(copies)
        ]
        each: list[Any] = [row[name] for name in rows[0] for row in rows]
        sums = [sum(each[at : at + copies]) for at in range(0, len(each), copies)]
        return {name: total / copies for name, total in zip(rows[0], sums, strict=True)}

    [first, *others] = on_ranks(copies * shards, nets.decoder, gradients)
    assert all(equal(first, other) for other in others)
    torch.manual_seed(0)
    for name, value in expected(nets.decoder()).items():
        assert_near(first[name], value, 1e-6)


@pytest.mark.prove
@pytest.mark.parametrize(
    "mixture", mixtures("hybrid_shard_zero2", "zero1 in rows", "zero1 over both", "zero2 over both")
)
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
def test_hosts_that_share_memory_train_to_the_same_bits(
    mixture: str, compute: torch.dtype | None
) -> None:
    def rank(comm: Comm, models: list[nn.Module]) -> dict[str, Tensor]:
        model, precision = models[comm.rank], sw.Precision(param_dtype=compute)
        sharded = sw.shard(model, MIXTURES[mixture], comm=comm, mesh=(2, 2), precision=precision)
        trained(sharded, torch.optim.AdamW(model.parameters(), eps=1e-4))
        with torch.no_grad():
            model(nets.decoder_batch(9, 2)[0])
            for param in model.parameters():
                param.mul_(1.5)
        return trained(sharded, sw.optim.AdamW(sharded, eps=1e-4))

    def models() -> list[nn.Module]:
        return [seeded(nets.tied_decoder) for _ in range(4)]

    [expected, *_] = run_threads(4, rank, models())
    for state in run_hosts(2, 2, rank, models()):
        assert equal(state, expected)


@pytest.mark.parametrize(("mixture", "kept"), [("hybrid_shard", 2), ("hybrid_full", 1)])
def test_optimizer_state_exists_once_in_each_copy_or_once_at_all(mixture: str, kept: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sharded = sw.shard(model, mixture, comm=comm, mesh=(2, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        trained(sharded, optimizer)
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    numel = sum(param.numel() for param in nets.decoder().parameters())
    assert sum(on_ranks(4, nets.decoder, rank)) == kept * numel


def test_what_is_frozen_is_not_joined_in_each_step_until_it_is_trained() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[int]:
        sharded = sw.shard(model, "hybrid_full", comm=comm, mesh=(2, 2))
        replicate, _ = comm.axes(2, 2)
        sent = []
        for _ in range(2):
            train(model, nets.mostly_frozen_batch(comm.rank, 2))
            replicate.counters.reset()
            train(model, nets.mostly_frozen_batch(comm.rank, 2))
            sent.append(replicate.counters.bytes_sent["update"])
            for param in model.parameters():
                param.requires_grad_()
            sharded.relayout()
        numels = [bucket.layout.numel for bucket in sharded.buckets]
        assert sent[1] == sum(numels)  # 4 bytes of each, a quarter of them by each rank
        return sent

    trainable = [p.numel() for p in nets.mostly_frozen().parameters() if p.requires_grad]
    for few, every in on_ranks(4, nets.mostly_frozen, rank):
        assert sum(trainable) <= few < every / 4


@pytest.mark.parametrize("mixture", NAMES)
def test_each_axis_carries_the_lower_bound_and_the_schedule_says_so(mixture: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, MIXTURES[mixture], comm=comm, mesh=(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(sharded, optimizer)
        axes, recorder, schedule = comm.axes(2, 2), Recorder(sharded), sharded.schedule
        for axis in axes:
            axis.counters.reset()
        train(model, batches(0, comm.size)[comm.rank])
        nbytes = sum(bucket.layout.numel for bucket in sharded.buckets) * 4
        over_copies, over_shards = (axis.counters.bytes_sent for axis in axes)
        assert over_shards["reduce"] == nbytes / 2
        splits_copies = sharded.placement.splits_copies
        joined = {"reduce": nbytes / 4, "update": nbytes / 4}
        assert over_copies == (joined if splits_copies else {"reduce": nbytes / 2})
        sent = sum(over_shards.values()) + sum(over_copies.values())
        assert sum(map(schedule.sent, schedule.events)) == sent
        assert recorder.events == list(schedule.events)
        lines = str(schedule).splitlines()
        reduces, averages = (
            [line for line in lines if line.split()[0] == op] for op in ("reduce", "average")
        )
        assert len(reduces) == len(averages) > 0
        assert all("# reduce-scatter over shard, " in line for line in reduces)
        how = "reduce-scatter" if splits_copies else "all-reduce"
        assert all(f"# {how} over replicate, " in line for line in averages)

    on_ranks(4, nets.decoder, rank)


def test_units_of_a_grid_may_live_in_different_places() -> None:
    class Mixed(sw.Sharded):
        def _placements(self, units: Units) -> dict[str, Placement]:
            copied = placement_of("no_shard")
            return {
                unit.name: self.placement if at % 2 else copied for at, unit in enumerate(units)
            }

    def rank(comm: Comm, model: nn.Module, kind: Callable[..., sw.Sharded]) -> dict[str, Tensor]:
        options = Options(mesh=(2, 2))
        sharded = kind(model, placement_of("hybrid_full"), None, comm, options)
        return trained(sharded, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    [expected, *_] = on_ranks(4, nets.decoder, partial(rank, kind=sw.Sharded))
    for state in on_ranks(4, nets.decoder, partial(rank, kind=Mixed)):
        for name, value in expected.items():
            assert (state[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
def test_a_checkpoint_of_a_grid_goes_on_over_one_axis_and_back(
    strategy: str, tmp_path: Path
) -> None:
    def save(comm: Comm, model: nn.Module, name: str, how: Any) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, **how)
        optimizer = sw.optim.AdamW(sharded, lr=0.01)
        trained(sharded, optimizer)
        sharded.save(tmp_path / name, optimizer)
        return trained(sharded, optimizer)

    def load(comm: Comm, model: nn.Module, name: str, how: Any) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, **how)
        optimizer = sw.optim.AdamW(sharded, lr=0.01)
        sharded.load(tmp_path / name, optimizer)
        return trained(sharded, optimizer)

    grid = {"strategy": strategy, "mesh": (2, 2)}
    [one, *_] = on_ranks(4, nets.decoder, partial(save, name="grid", how=grid))
    [other, *_] = on_ranks(4, nets.decoder, partial(load, name="grid", how={}))
    on_ranks(4, nets.decoder, partial(save, name="axis", how={}))
    [third, *_] = on_ranks(4, nets.decoder, partial(load, name="axis", how=grid))
    for name, value in one.items():
        assert (other[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
        assert (third[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_a_placement_that_cannot_be_says_what_can() -> None:
    wrong = partial(Placement, "mine", hybrid=True)
    assert "has no axis 'rows'" in error_text(
        ConfigError, lambda: wrong(("rows",), ("rows",), ("rows",))
    )
    assert "gradients over every axis of parameters" in error_text(
        ConfigError, lambda: wrong(("shard",), (), ("shard",))
    )
    assert "only the optimizer may be" in error_text(ConfigError, lambda: wrong((), BOTH, BOTH))
    assert "only the optimizer may be" in error_text(
        ConfigError, lambda: wrong((), (), ("replicate",))
    )
