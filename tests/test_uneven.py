"""Ranks that do not all have the same to do: other branches, and votes that end a loop together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import on_ranks, seeded
from tests.nets import loss, tied_decoder, tied_decoder_batch
from tests.parity.plain import mean_in_rank_order, put_gradients
from tests.parity.sharded import distance
from tests.steps import STRATEGIES, assert_at_rest

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_ranks_stop_together() -> None:
    """The loop of docs/step.md: all end it as soon as one has no batch."""

    def rank(comm: Comm, model: nn.Module) -> tuple[list[bool], int]:
        sharded = sw.shard(model, comm=comm)
        votes = [sharded.any(comm.rank == 1), sharded.all(comm.rank == 1)]
        votes += [sharded.any(False), sharded.all(torch.tensor(True))]
        batches, steps = (tied_decoder_batch(n, 2) for n in range(4 - comm.rank)), 0
        while sharded.all((batch := next(batches, ())) != ()):
            loss(model, batch).backward()
            steps += 1
        return votes, steps

    assert on_ranks(3, tied_decoder, rank) == [([True, False, False, True], 2)] * 3


def one_process(
    model: nn.Module,
    make: MakeOptimizer,
    steps: int,
    losses: Callable[[nn.Module, int], Iterator[list[Tensor]]],
) -> dict[str, Tensor]:
    """The model after ``steps``, each with the mean over the ranks whose ``losses`` there are."""
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        parts = []
        for of_rank in losses(model, step):
            for one in of_rank:
                one.backward()
            parts.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad()
        put_gradients(model, mean_in_rank_order(parts))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def rows(seed: int, count: int) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


# --- other branches and other lengths ------------------------------------------------------------


class Routed(nn.Module):
    """Each rank's batch goes to the experts that its first number picks, and may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.tail = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, picked: Sequence[int], depth: int) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = x + sum(torch.tanh(self.experts[index](x)) for index in picked)
        for layer in self.tail[:depth]:
            x = torch.tanh(layer(x))
        return x


Route = tuple[Tensor, list[int], int]

IN_ORDER: tuple[list[int], ...] = (
    [0],
    [1, 2],
    [1, 1],
    [],
    [0, 2, 2],
)  # the experts of a batch, 3 for nobody
ANY_ORDER = ([0, 1, 0], [2, 0], [1, 2], [2, 1, 2, 0])


def routes(ways: Sequence[list[int]], step: int, rank: int, part: int) -> Route:
    """Each rank calls other experts, some twice, and may leave out the last layers."""
    picked = ways[(rank + 2 * step + part) % len(ways)]
    only_later = [3] if (step, rank) == (1, 0) else []  # the others call it never
    return rows(100 * step + 10 * rank + part, 1 + rank), picked + only_later, (rank + step) % 3


def routed_by_one_process(world: int, ways: Sequence[list[int]]) -> dict[str, Tensor]:
    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(world):
            yield [model(*routes(ways, step, rank, part)).pow(2).mean() / 2 for part in range(2)]

    return one_process(seeded(Routed), sgd, 3, losses)


MESHES = {4: (2, 2), 3: (3, 1), 2: (1, 2)}


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize(
    ("strategy", "ways"),
    [(strategy, IN_ORDER) for strategy in (*STRATEGIES, "hybrid_shard", "hybrid_full")]
    + [(strategy, ANY_ORDER) for strategy in (*STRATEGIES[:3], "hybrid_shard_zero2")],
)
def test_experts_and_early_exits_may_differ_by_rank(
    strategy: str, ways: Sequence[list[int]], world: int
) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        mesh: Any = {"mesh": MESHES[world]} if "hybrid" in strategy else {}
        wrap = sw.wrap.by_class(nn.Linear)
        sharded = sw.shard(model, strategy, wrap, comm, divergence="participate", **mesh)
        optimizer = sgd(list(model.parameters()))
        for step in range(3):
            with torch.no_grad():
                model(*routes(ways, step, comm.rank, 7))
            for part in range(2):
                with sharded.accumulate(last=part == 1):
                    (model(*routes(ways, step, comm.rank, part)).pow(2).mean() / 2).backward()
            if mesh.get("mesh") != (3, 1):  # there whole parameters and shards are one memory
                assert_at_rest(sharded)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = routed_by_one_process(world, ways)
    for state in on_ranks(world, Routed, rank):
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("strategy", ["zero1", "shard_grad_op"])
def test_a_step_of_several_forward_passes_may_differ_by_rank(strategy: str) -> None:
    def both(model: nn.Module, rank: int) -> list[Tensor]:
        first, second = (model(*routes(IN_ORDER, step, rank, 0)) for step in range(2))
        return [first.pow(2).mean() + second.mean()]

    def work(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        wrap, optimizer = sw.wrap.by_class(nn.Linear), sgd(list(model.parameters()))
        sw.shard(model, strategy, wrap, comm, divergence="participate")
        both(model, comm.rank)[0].backward()
        optimizer.step()
        return model.state_dict()

    expected = one_process(
        seeded(Routed), sgd, 1, lambda model, _: (both(model, rank) for rank in range(2))
    )
    for state in on_ranks(2, Routed, work):
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


class Recomputed(Routed):
    """All its units are recomputed at once."""

    def forward(self, x: Tensor, picked: Sequence[int], depth: int) -> Any:
        return checkpoint(super().forward, x, picked, depth, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
@pytest.mark.parametrize(
    ("net", "picked", "how"),
    [
        (Routed, [0, 1, 0], r"experts\.0' is called after its last place"),
        (Routed, [1, 0], r"experts\.0' is called after its last place"),
        (Recomputed, [0], "embed' is recomputed before its place"),
    ],
)
def test_a_unit_that_other_ranks_would_not_gather_now_is_an_error(
    net: type[Routed], picked: list[int], how: str
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        wrap = sw.wrap.by_class(nn.Linear)
        sharded = sw.shard(model, "full_shard", wrap, comm, divergence="participate")
        model(rows(0, 2), [0, 1] if comm.rank else picked, 2).sum().backward()
        sharded.clip_grad_norm_(1.0)

    with pytest.raises(sw.ScheduleError, match=how):
        on_ranks(2, net, rank)
