"""Both ways to accumulate: exactly what is sent, and what lies there between micro-batches."""

from __future__ import annotations

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.doctor.accumulation import accumulated
from shardwise.plan.bytes import blueprints
from tests.nets import NETS, Net, loss
from tests.ranks import run_threads
from tests.steps import STRATEGIES

MICRO_BATCHES = 4
HYBRIDS = ("hybrid_shard", "hybrid_full")
OPS = ("gather", "update", "reduce", "spread")
MESHES = dict.fromkeys(HYBRIDS, (2, 2))


def measured(comm: Comm, net: Net, strategy: str, each: bool) -> tuple[int, int]:
    """Bytes that this rank sends in the second step, and its gradients between micro-batches."""
    model: nn.Module = net.build()
    sharded = sw.shard(model, strategy, comm=comm, mesh=MESHES.get(strategy))
    axes = comm.axes(2, 2) if strategy in HYBRIDS else (comm,)
    for _ in range(2):
        for axis in axes:
            axis.counters.reset()
        for number in range(MICRO_BATCHES):
            if number:
                grads = (param.grad for param in model.parameters())
                between = sum(grad.nbytes for grad in grads if grad is not None)
            with sharded.accumulate(last=each or number == MICRO_BATCHES - 1):
                loss(model, net.batch(comm.rank, 2)).backward()
        model.zero_grad()
    return sum(axis.counters.bytes_sent.get(op, 0) for axis in axes for op in OPS), between


@pytest.mark.parametrize("strategy", [*STRATEGIES, *HYBRIDS])
def test_both_ways_to_accumulate_cost_what_is_measured(strategy: str) -> None:
    world = 4 if strategy in HYBRIDS else 2
    net = NETS[0]
    costs = {each: run_threads(world, measured, net, strategy, each) for each in (True, False)}
    for rank in range(world):
        model = net.build()
        drawings = blueprints(model, (rank, world), MESHES.get(strategy))
        blueprint = next(drawn for drawn in drawings if drawn.placement.name == strategy)
        way = accumulated(model, blueprint, MICRO_BATCHES)
        assert costs[True][rank] == (way.sent_each, way.gradients_each)
        assert costs[False][rank] == (way.sent_once, way.gradients_once)
        assert way.sent_each > way.sent_once
        assert way.gradients_each <= way.gradients_once
