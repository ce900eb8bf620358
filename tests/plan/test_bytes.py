"""Bytes by strategy: exactly what the tensors of a sharded model sum to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.plan.bytes import Kept, kept, table_of
from shardwise.plan.draw import draw
from shardwise.plan.forecast.memory import OPTIMIZERS
from tests.fake import FakeComm
from tests.nets import NETS, Net, loss
from tests.ranks import run_threads
from tests.steps import STRATEGIES

FROZEN, SCALAR = NETS[3], NETS[4]
COUNTED = ("gather", "update", "reduce")
MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def bytes_kept(
    comm: Comm, net: Net, strategy: str, optimizer: str
) -> tuple[int, int, int, int, int]:
    torch.manual_seed(0)
    model: nn.Module = net.build()
    sharded = sw.shard(model, strategy, comm=comm)
    trained = [param for param in model.parameters() if param.requires_grad]
    stepped = MAKE[optimizer](trained)
    comm.counters.reset()
    loss(model, net.batch(comm.rank, 2)).backward()
    sent = sum(comm.counters.bytes_sent.get(op, 0) for op in ("gather", "reduce", "spread"))
    sent -= sum(b.spec.gather_sent for b in sharded.buckets if b.spec.kept)  # in this step only
    stepped.step()
    state = [value for values in stepped.state.values() for value in values.values()]
    grads = [param.grad for param in model.parameters()]
    at_rest = sum(bucket.shard.nbytes for bucket in sharded.buckets)
    return nbytes(model.parameters()), nbytes(grads), nbytes(state), at_rest, sent


def predicted(row: Kept) -> tuple[int, int, int, int, int]:
    at_rest = row.parameters + row.padding
    return row.parameters, row.gradients, row.optimizer, at_rest, row.sent


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", [SCALAR, FROZEN], ids=str)
def test_predictions_are_what_the_tensors_sum_to(net: Net, optimizer: str) -> None:
    for index, strategy in enumerate(STRATEGIES):
        ranks = run_threads(2, bytes_kept, net, strategy, optimizer)
        for rank, measured in enumerate(ranks):
            assert measured == predicted(table_of(net.build(), (rank, 2), optimizer)[index])


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
def test_what_copies_have_updated_is_kept_besides_in_the_dtype_that_is_computed_in(
    compute: torch.dtype | None,
) -> None:
    precision = sw.Precision(param_dtype=compute)
    model = FROZEN.build()
    rows = table_of(model, (2, 4), mesh=(2, 2), precision=precision)
    by_name = {row.strategy: row for row in rows}
    comm = FakeComm(2, 4)
    sharded = sw.shard(model, "hybrid_full", comm=comm, mesh=(2, 2), precision=precision)
    planned = sharded.schedule  # whose order is a guess, as there
    loss(model, FROZEN.batch(0, 2)).backward()
    stored = {
        b.shard.untyped_storage().data_ptr(): b.shard.untyped_storage().nbytes()
        for b in sharded.buckets
    }
    stored |= {
        b._sent.joined.untyped_storage().data_ptr(): b._sent.joined.untyped_storage().nbytes()
        for b in sharded.buckets
        if b.spec.splits_copies
    }
    row = by_name["hybrid_full"]
    assert row.parameters + row.padding + row.joined == sum(stored.values())
    assert row.gradients == nbytes(param.grad for param in model.parameters())
    assert row.calls["update"] == sum(bucket.spec.splits_copies for bucket in sharded.buckets)
    assert row.sent == sum(map(planned.sent, planned.events))
    assert {row.joined for name, row in by_name.items() if name != "hybrid_full"} == {0}


@pytest.mark.parametrize("offload", ["optimizer", "everything"])
@pytest.mark.parametrize("strategy", ["zero1", "full_shard", "hybrid_full"])
def test_what_is_in_host_memory_is_counted_apart(strategy: str, offload: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False))
    cases = (("adamw", "none"), ("sgd", offload), ("adamw", offload))
    tables = [table_of(model, (2, 4), name, (2, 2), offload=given) for name, given in cases]
    plain, sgd, adamw = ({row.strategy: row for row in rows}[strategy] for rows in tables)
    mesh = (2, 2) if strategy == "hybrid_full" else None
    sharded = sw.shard(model, strategy, comm=FakeComm(2, 4), mesh=mesh, offload=offload)
    model(torch.ones(2, 64)).sum().backward()
    host, staged = sharded.buckets[0].host, [b for b in sharded.buckets if b.spec.staged]
    assert sgd.in_host == host.nbytes > plain.in_host == 0
    storages = {b._sent.joined.untyped_storage() for b in staged}
    own = sum(b.shard.nbytes for b in staged if not b.spec.in_host and b.spec.splits_copies)
    assert adamw.joined == sum(storage.nbytes() for storage in storages) - own
    stepped = torch.optim.AdamW(model.parameters())
    stepped.step()
    state = nbytes(value for values in stepped.state.values() for value in values.values())
    assert (adamw.in_host - sgd.in_host, adamw.optimizer) == (state, 0)
    together = plain.parameters + plain.gradients + plain.optimizer
    assert together == adamw.in_host + adamw.parameters + adamw.gradients + adamw.optimizer


def test_state_of_8_bits_is_codes_and_scales_of_large_parameters_and_tables_once() -> None:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8, bias=False))
    rows = table_of(model, (0, 2), "adamw_8bit", blocksize=256)
    sw.shard(model, comm=FakeComm(0, 2), blocksize=256)
    model(torch.ones(2, 64)).sum().backward()
    stepped = optim.AdamW8bit(model.parameters())
    stepped.step()
    values = [value for state in stepped.state.values() for value in state.values()]
    state = nbytes({id(value): value for value in values}.values())
    assert rows[STRATEGIES.index("full_shard")].optimizer == state
    no_shard = table_of(nn.Linear(64, 63), (0, 2), "adamw_8bit", blocksize=256)[0]
    assert no_shard.optimizer == 2 * 4 * 65 * 63  # none are quantised, and no table is made


def test_sharding_divides_what_is_kept_by_the_number_of_ranks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    rows = table_of(model, (3, 8), "adamw")
    numel = 4 * 1024 * 1024
    assert [row.between_steps for row in rows] == [16 * numel + 16, *[2 * numel + 16] * 3]
    assert rows[0].gathered == 0
    assert rows[3].gathered < rows[2].gathered == 4 * numel
    assert rows[3].buckets == 2 * 4 * 1024 * 1024  # one is written while another travels
    assert rows[3].calls == {"forward gather": 4, "backward gather": 3, "reduce": 4}


AXES = (
    (SCALAR, "full_shard", 1, None),
    (FROZEN, "zero1", 2, None),
    (SCALAR, "hybrid_shard", 3, (3, 1)),
    (SCALAR, "hybrid_full", 4, (2, 2)),
)


def test_calls_are_the_collectives_that_are_counted() -> None:
    """A gather among one rank is none, and what is frozen and stays is gathered once."""
    for net, strategy, world, mesh in AXES:

        def counted(
            comm: Comm, net: Net = net, strategy: str = strategy, mesh: Any = mesh
        ) -> dict[str, int]:
            model = net.build()
            sharded = sw.shard(model, strategy, comm=comm, mesh=mesh)
            axes = {axis for bucket in sharded.buckets for axis in bucket.mesh}
            loss(model, net.batch(comm.rank, 2)).backward()
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
            for axis in axes:
                axis.counters.reset()
            loss(model, net.batch(comm.rank, 2)).backward()
            return {op: sum(axis.counters.calls.get(op, 0) for axis in axes) for op in COUNTED}

        model = net.build()
        calls = Counter[str]()
        drawn = draw(model, strategy, ranks=(0, world), mesh=mesh)
        for name, number in kept(model, drawn).calls.items():
            calls[name.split()[-1].replace("average", "reduce")] += number
        assert run_threads(world, counted) == [{op: calls[op] for op in COUNTED}] * world
