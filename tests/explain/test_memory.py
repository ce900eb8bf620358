"""Bytes by strategy: exactly what the tensors of a sharded model sum to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.explain.memory import OPTIMIZERS, Kept, table_of
from tests.nets import NETS, Net, loss
from tests.ranks import run_threads
from tests.steps import STRATEGIES

FROZEN, SCALAR = NETS[3], NETS[4]
MAKE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def kept(comm: Comm, net: Net, strategy: str, optimizer: str) -> tuple[int, int, int, int, int]:
    torch.manual_seed(0)
    model: nn.Module = net.build()
    sharded = sw.shard(model, strategy, comm=comm)
    trained = [param for param in model.parameters() if param.requires_grad]
    stepped = MAKE[optimizer](trained)
    comm.counters.reset()
    loss(model, net.batch(comm.rank, 2)).backward()
    sent = sum(comm.counters.bytes_sent.get(op, 0) for op in ("gather", "reduce", "spread"))
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
        ranks = run_threads(2, kept, net, strategy, optimizer)
        for rank, measured in enumerate(ranks):
            assert measured == predicted(table_of(net.build(), (rank, 2), optimizer)[index])


def test_sharding_divides_what_is_kept_by_the_number_of_ranks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    rows = table_of(model, (3, 8), "adamw")
    numel = 4 * 1024 * 1024
    assert [row.between_steps for row in rows] == [
        16 * numel + 16,
        *[2 * numel + 16] * 3,
    ]
    assert rows[0].gathered == 0
    assert rows[3].gathered < rows[2].gathered == 4 * numel
    assert rows[3].calls == {"forward gather": 4, "backward gather": 3, "reduce": 4}
