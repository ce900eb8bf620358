"""Both axes at once: two ranks split the parameters, and two more hold copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import threads
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Comm
from shardwise.options import Options
from shardwise.schedule.events import Op
from shardwise.schedule.placement import Placement
from shardwise.strategies import placement_of
from shardwise.units.units import Units
from tests import nets
from tests.copies import clones, equal, seeded
from tests.ranks import run_threads
from tests.steps import train

T = TypeVar("T")
FULL, COPIED = placement_of("full_shard"), placement_of("no_shard")


def on_a_grid(build: Callable[[], nn.Module], fn: Callable[[sw.Sharded, Mesh], T]) -> list[T]:
    """``fn`` on four ranks: 0 and 1 split what 2 and 3 split again."""
    models = [seeded(build) for _ in range(4)]
    rows, columns = ([threads._Rendezvous(2, 20.0) for _ in range(2)] for _ in range(2))

    def rank(comm: Comm) -> T:
        copy, part = divmod(comm.rank, 2)
        axes = (threads._ThreadsComm(part, rows[copy]), threads._ThreadsComm(copy, columns[part]))
        mesh = Mesh(*axes)

        class Grid(sw.Sharded):
            def _mesh(self, placement: Placement) -> Mesh:
                return mesh

        return fn(Grid(models[comm.rank], FULL, None, comm, Options()), mesh)

    return run_threads(4, rank)


def steps(sharded: sw.Sharded, rank: int) -> dict[str, Tensor]:
    optimizer = sw.optim.SGD(sharded, lr=0.1, momentum=0.9, max_norm=0.5)
    for step in range(2):
        with sharded.accumulate(last=step > 0):
            train(sharded.model, nets.decoder_batch(4 * step + rank, 2))
        if step > 0:
            optimizer.step()
            optimizer.zero_grad()
    return clones(sharded.model.state_dict())


def test_on_both_axes_training_is_that_of_one() -> None:
    def over_one_axis(comm: Comm, model: nn.Module, strategy: str) -> dict[str, Tensor]:
        return steps(sw.shard(model, strategy, comm=comm), comm.rank)

    found = on_a_grid(nets.decoder, lambda sharded, _: steps(sharded, sharded.comm.rank))
    models = [seeded(nets.decoder) for _ in range(4)]
    [expected, *_] = run_threads(4, lambda c: over_one_axis(c, models[c.rank], "full_shard"))
    assert all(equal(found[0], other) for other in found)
    for name, value in expected.items():
        assert (found[0][name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_each_axis_carries_the_lower_bound_and_the_schedule_says_so() -> None:
    def rank(sharded: sw.Sharded, mesh: Mesh) -> None:
        train(sharded.model, nets.decoder_batch(sharded.comm.rank, 2))
        for comm in mesh:
            comm.counters.reset()
        train(sharded.model, nets.decoder_batch(sharded.comm.rank, 2))
        nbytes = sum(bucket.layout.numel for bucket in sharded.buckets) * 4
        over_shards, over_copies = (comm.counters.bytes_sent for comm in mesh)
        assert over_shards["reduce"] == nbytes / 2
        assert over_copies == {"reduce": nbytes / 4, "spread": nbytes / 4}
        schedule = sharded.schedule
        assert sum(map(schedule.sent, schedule.events)) == sum(over_shards.values()) + nbytes / 2
        assert "reduce-scatter + reduce-scatter + all-gather" in str(schedule)

    on_a_grid(nets.decoder, rank)


def test_units_that_live_in_different_places_train_alike() -> None:
    """Some are split, others are copied, and the norm is that of all of them."""

    class Mixed(sw.Sharded):
        def _placements(self, units: Units) -> dict[str, Placement]:
            return {unit.name: FULL if at % 2 else COPIED for at, unit in enumerate(units)}

    def rank(comm: Comm, model: nn.Module, kind: type[sw.Sharded]) -> dict[str, Tensor]:
        sharded = kind(model, FULL, None, comm, Options())
        if kind is Mixed:
            assert str(sharded.units).count("replicated") == -(-len(sharded.units) // 2)
            gathered = {e.unit for e in sharded.schedule.events if e.op is Op.GATHER}
            assert gathered == {unit.name for unit in sharded.units[1::2]}
        return steps(sharded, comm.rank)

    models = [[seeded(nets.decoder) for _ in range(3)] for _ in range(2)]
    expected = run_threads(3, lambda c: rank(c, models[0][c.rank], sw.Sharded))
    mixed = run_threads(3, lambda c: rank(c, models[1][c.rank], Mixed))
    assert all(equal(one, expected[0]) for one in mixed)


def test_a_checkpoint_of_a_grid_is_one_of_its_model(tmp_path: Path) -> None:
    def rank(sharded: sw.Sharded, mesh: Mesh) -> dict[str, Tensor]:
        train(sharded.model, nets.decoder_batch(sharded.comm.rank, 2))
        optimizer: Any = torch.optim.SGD(sharded.model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        sharded.save(tmp_path / "grid", optimizer)
        return clones(sharded.model.state_dict())

    [expected, *_] = on_a_grid(nets.decoder, rank)
    alone = sw.shard(seeded(nets.decoder, 1))
    alone.load(tmp_path / "grid")
    assert equal(alone.model.state_dict(), expected)
