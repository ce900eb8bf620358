"""A grid of ranks: its shape, its axes, and which ranks each of them holds."""

from __future__ import annotations

from functools import partial
from threading import Event
from time import sleep

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.comm.grid import Grid, Shape, shape_of
from shardwise.comm.machine.connect import over
from shardwise.comm.mesh import Mesh, gather_rows
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports import shared_memory as shared_memory_module
from shardwise.errors import ConfigError, RanksDisagree
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.fake import FakeComm
from tests.nets import loss, tied_decoder, tied_decoder_batch
from tests.ranks import gloo_group, outcomes_of, run_hosts, run_threads

HYBRID, FULL = ("hybrid_shard", True), ("full_shard", False)  # strategies: are there two axes?


# ---- the shape -----------------------------------------------------------------------------------


def test_a_row_is_a_host_unless_a_shape_is_passed() -> None:
    assert shape_of(*HYBRID, 8, None, 4) == Shape(replicate=2, shard=4)
    assert shape_of(*HYBRID, 8, (4, 2), 4) == Shape(replicate=4, shard=2)
    assert shape_of(*HYBRID, 6, [3, 2], None) == Shape(replicate=3, shard=2)
    assert shape_of(*HYBRID, 8, (1, 8), 4) == Shape(replicate=1, shard=8)
    assert shape_of(*FULL, 8, None, 4) is None


@pytest.mark.parametrize(("ndim", "shape"), [(2, Shape(4, 2)), (1, Shape(2, 4))])
def test_a_device_mesh_of_two_axes_is_a_shape(
    monkeypatch: pytest.MonkeyPatch, ndim: int, shape: Shape
) -> None:
    monkeypatch.setattr(DeviceMesh, "ndim", ndim)
    monkeypatch.setattr(DeviceMesh, "mesh", torch.arange(8).view(4, 2))
    assert shape_of(*HYBRID, 8, DeviceMesh.__new__(DeviceMesh), 4) == shape


def test_a_wrong_product_names_both_numbers() -> None:
    assert error_text(ConfigError, lambda: shape_of(*HYBRID, 6, (2, 2), 2)).startswith(
        "the mesh is replicate=2 × shard=2, for 4 ranks, and there are 6. Pass mesh="
    )
    assert "for 6 ranks" in error_text(ConfigError, lambda: shape_of(*HYBRID, 6, (-2, -3), 2))
    assert (
        "there are 6 ranks, and LOCAL_WORLD_SIZE=4 on this host; 6 is no multiple of 4"
        in error_text(ConfigError, lambda: shape_of(*HYBRID, 6, None, 4))
    )
    assert (
        "LOCAL_WORLD_SIZE, which says how many of the 6 ranks are on a host, is not set"
        in error_text(ConfigError, lambda: shape_of(*HYBRID, 6, None, None))
    )


def test_one_rank_needs_no_launcher() -> None:
    assert shape_of(*HYBRID, 1, None, None) == shape_of(*HYBRID, 1, None, 8) == Shape(1, 1)
    with pytest.raises(ConfigError, match="for 4 ranks, and there are 1"):
        shape_of(*HYBRID, 1, (2, 2), None)


@pytest.mark.parametrize("mesh", [(4,), (1, 2, 2), ("2", "2"), []])
def test_a_mesh_is_two_numbers(mesh: object) -> None:
    for strategy in (HYBRID, FULL):
        with pytest.raises(ConfigError, match=r"it is two numbers of ranks, \(replicate, shard\)"):
            shape_of(*strategy, 4, mesh, 2)


def test_one_axis_is_asked_for_where_the_strategy_has_one() -> None:
    assert "strategy 'full_shard' uses one axis, and the mesh has two, (2, 2)" in error_text(
        ConfigError, lambda: shape_of(*FULL, 4, (2, 2), None)
    )


def test_it_is_drawn_with_a_row_for_each_copy() -> None:
    assert Shape(2, 6).draw() == (
        "replicate=2 × shard=6\n   0   1   2   3   4   5\n   6   7   8   9  10  11"
    )
    assert Shape(2, 5).draw() == "replicate=2 × shard=5\n  0  1  2  3  4\n  5  6  7  8  9"
    assert Shape(1, 11).draw().endswith("\n   0   1   2   3   4   5   6   7   8   9  10")


# ---- the axes ------------------------------------------------------------------------------------


def ranks_of_axes(comm: Comm) -> tuple[list[int], list[int]]:
    replicate, shard = comm.axes(2, 3)
    assert comm.axes(2, 3) == (replicate, shard)  # the same objects
    mine = torch.tensor([comm.rank])
    column = replicate.gather_rows(mine, Label("demo")).flatten().tolist()
    return column, shard.gather_rows(mine, Label("demo")).flatten().tolist()


GRID = [
    ([0, 3], [0, 1, 2]),
    ([1, 4], [0, 1, 2]),
    ([2, 5], [0, 1, 2]),
    ([0, 3], [3, 4, 5]),
    ([1, 4], [3, 4, 5]),
    ([2, 5], [3, 4, 5]),
]


def test_ranks_are_numbered_row_by_row() -> None:
    assert run_threads(6, ranks_of_axes) == GRID


def test_rows_of_both_axes_come_in_the_order_of_positions() -> None:
    def rank(comm: Comm) -> list[int]:
        mesh = Mesh.of(comm, splits=True, shape=Shape(2, 3))
        axes = (mesh.replicate, mesh.shard)
        return gather_rows(torch.tensor([comm.rank]), axes, Label("demo")).flatten().tolist()

    assert run_threads(6, rank) == [[0, 3, 1, 4, 2, 5]] * 6


def test_a_rank_without_peers_has_a_place_in_its_grid() -> None:
    replicate, shard = FakeComm(7, 12).axes(3, 4)
    assert (replicate.rank, replicate.size, shard.rank, shard.size) == (1, 3, 3, 4)


def test_what_is_not_split_is_replicated_over_all_ranks_of_the_grid() -> None:
    mesh = Mesh.of(FakeComm(1, 6), splits=False, shape=Shape(2, 3))
    assert (mesh.shard.size, mesh.replicate.size) == (1, 6)


@pytest.mark.parametrize("shape", [None, Shape(1, 6), Shape(2, 3), Shape(6, 1)])
@pytest.mark.parametrize("splits", [True, False])
def test_its_grid_is_the_one_that_is_drawn_without_it(splits: bool, shape: Shape | None) -> None:
    for rank in range(6):
        mesh = Mesh.of(FakeComm(rank, 6), splits, shape)
        assert mesh.grid == Grid.of(rank, 6, splits, shape)
        mesh.shard.memory.shared = True
        assert [axis.shared for axis in mesh.grid] == [True, mesh.replicate is mesh.shard]


@pytest.mark.parametrize(
    ("world", "splits", "sizes"), [(1, False, (1, 1)), (2, False, (1, 2)), (2, True, (2, 1))]
)
def test_one_axis_is_all_ranks_and_the_other_is_this_rank_alone(
    world: int, splits: bool, sizes: tuple[int, int]
) -> None:
    comm = FakeComm(0, world)
    mesh = Mesh.of(comm, splits)
    assert (mesh.shard.size, mesh.replicate.size) == sizes
    assert (mesh.shard if splits or world == 1 else mesh.replicate) is comm


def test_an_error_on_an_axis_names_its_ranks_by_their_numbers_among_all() -> None:
    def rank(comm: Comm) -> str:
        replicate, _ = comm.axes(2, 2)
        label = Label("gather", "head" if comm.rank == 3 else "tail")
        if comm.rank in (1, 3):
            return error_text(RanksDisagree, lambda: replicate.gather_rows(torch.ones(1), label))
        return ""

    messages = run_threads(4, rank)
    assert messages[1] == messages[3]
    assert messages[1].startswith(
        "on the replicate axis, whose ranks 0 to 1 are [1, 3] of all: "
    ), messages[1]


def test_a_rank_that_ended_before_an_axis_was_made_has_left_it() -> None:
    closed = Event()

    def rank(comm: Comm) -> str:
        if comm.rank == 3:
            comm.close("it had enough")
            closed.set()
            return ""
        assert closed.wait(10)
        replicate, _ = comm.axes(2, 2)
        do = partial(replicate.gather_rows, torch.ones(1), Label("demo"))
        return error_text(RanksDisagree, do) if comm.rank == 1 else ""

    assert "are [1, 3] of all: rank 1 has left (it had enough" in run_threads(4, rank)[1]


# ---- hosts whose ranks share memory --------------------------------------------------------------


class Slow(nn.Linear):
    """Computes late, once it is told to."""

    delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.delay)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@pytest.mark.parametrize("graph", [True, False])
def test_no_rank_writes_what_another_of_its_host_still_computes_with(
    strategy: str, graph: bool
) -> None:
    def rank(comm: Comm) -> list[float]:
        slow = Slow(4, 4)
        model = nn.Sequential(slow, nn.Linear(4, 4))
        for param in model.parameters():
            nn.init.ones_(param)
        sw.shard(model, strategy, comm=comm, mesh=(2, 2))
        slow.delay = 0.3 * (comm.rank % 2)
        with torch.set_grad_enabled(graph):
            output = model(torch.ones(2, 4))  # and no backward pass
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return list(output[0].tolist())

    assert run_hosts(2, 2, rank) == [[21.0] * 4] * 4


def test_a_layout_takes_the_place_of_the_one_before_in_memory_that_an_axis_shares() -> None:
    def rank(comm: Comm) -> list[int]:
        sharded = sw.shard(nn.Linear(64, 64), "hybrid_shard", comm=comm, mesh=(2, 2))
        used = []
        for _ in range(4):
            sharded.relayout()
            used.append(sharded.buckets[0].full.data_ptr())
        return used

    for used in run_hosts(2, 2, rank):
        assert len(set(used)) <= 2


# ---- processes -----------------------------------------------------------------------------------


def stepped(comm: Comm, model: nn.Module, mesh: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """The values after two steps; without ``mesh`` it is that of the launcher."""
    sharded = sw.shard(model, "hybrid_full", comm=comm, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss(model, tied_decoder_batch(4 * step + comm.rank, 2)).backward()
        sharded.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return clones(model.state_dict())


def on_hosts_of_two(rank: int, world: int, folder: str) -> list[object]:
    """Ranks 0 and 1 are on one host, 2 and 3 on another; how they are connected, and what works."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(shared_memory_module, "proc_namespace", lambda: f"host {rank // 2}")
    with gloo_group(rank, world, folder), sw.connect() as comm:
        replicate, shard = comm.axes(2, 2)
        names = [type(ranks).__name__ for ranks in (comm, replicate, shard)]
        column = replicate.gather_rows(torch.tensor([rank]), Label("demo")).flatten().tolist()
        row = shard.gather_rows(torch.tensor([rank]), Label("demo")).flatten().tolist()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        state = stepped(comm, seeded(tied_decoder))
        mesh = init_device_mesh("cpu", (2, 2))
        with over(mesh) as grid:
            sizes = [axis.size for axis in grid.axes(2, 2)]
        with pytest.raises(ConfigError, match=r"is \[\[0, 2\], \[1, 3\]\]. It must hold all ranks"):
            over(DeviceMesh("cpu", [[0, 2], [1, 3]]))
        return [*names, column, row, sizes, state]


@pytest.mark.spawn
def test_a_host_shares_memory_and_hosts_send_messages() -> None:
    [expected, *_] = on_ranks(4, tied_decoder, partial(stepped, mesh=(2, 2)))
    outcomes = outcomes_of(4, on_hosts_of_two)
    assert [outcome.error for outcome in outcomes] == [""] * 4
    for rank, outcome in enumerate(outcomes):
        row = [0, 1] if rank < 2 else [2, 3]
        column = [rank % 2, rank % 2 + 2]
        kinds = ["GlooComm", "GlooComm", "SharedMemoryComm"]
        *names, state = outcome.value
        assert names == [*kinds, column, row, [2, 2]]
        assert equal(state, expected)
