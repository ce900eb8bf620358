"""A trace held against the engine: the same gradients, and the same collectives."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.plan.schedule.events import Event
from tests.copies import local
from tests.watched import Watched

SHOWN = ("gather", "reduce", "spread", "update")


@dataclass(frozen=True)
class Step:
    """What one rank did and has: by the engine, or by the programs."""

    collectives: list[str]
    sent: dict[str, int]
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def grad_of(output: Tensor, rank: int) -> Tensor:
    """What the backward pass of this rank begins with."""
    numbers = torch.randn(output.shape, generator=torch.Generator().manual_seed(rank))
    return numbers.to(output.dtype)


def by_engine(
    comm: Comm, model: nn.Module, inputs: tuple[Any, ...], strategy: str, **options: Any
) -> tuple[Step, tuple[Event, ...]]:
    """The second step of a sharded copy, and the schedule that it followed."""
    watched, copied = Watched(comm), deepcopy(model)
    sharded = sw.shard(copied, strategy, comm=watched, **options)
    copied(*inputs).sum().backward()
    copied.zero_grad()
    watched.log.clear()
    comm.counters.reset()
    with sw.record(sharded) as recording:
        output = copied(*inputs)
        output.backward(grad_of(output, comm.rank))
    assert recording.events == sharded.schedule.events
    grads = {
        name: None if param.grad is None else local(param.grad)
        for name, param in copied.named_parameters()
        if param.requires_grad
    }
    return Step(*_shown(watched), [output.detach()], grads), recording.events


def by_programs(comm: Comm, traced: sw.Trace, model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """A step by both programs, on the model's whole values."""
    watched = Watched(comm)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copied = {name: value.detach().clone() for name, value in state.items()}
    comm.counters.reset()
    fakes = [node.meta["val"] for node, has_gradient in traced.joint.outputs if has_gradient]
    ran = traced.run(watched, copied, inputs, [grad_of(fake, comm.rank) for fake in fakes])
    return Step(*_shown(watched), list(ran.outputs), ran.gradients)


def _shown(watched: Watched) -> tuple[list[str], dict[str, int]]:
    log = [line for line in watched.log if line.split()[0] in SHOWN]
    sent = watched.counters.bytes_sent
    return log, {op: nbytes for op, nbytes in sent.items() if op in SHOWN}


def printed(traced: sw.Trace) -> tuple[list[str], dict[str, int]]:
    """The collectives as the programs' lines show them."""
    sent: dict[str, int] = {}
    for collective in traced.collectives:
        sent[collective.op] = sent.get(collective.op, 0) + collective.sent
    return [f"{c.op} {c.unit}".strip() for c in traced.collectives], sent


def assert_equal(trace: Step, engine: Step) -> None:
    """Bit for bit, and collective for collective."""
    assert (trace.collectives, trace.sent) == (engine.collectives, engine.sent)
    assert all(map(torch.equal, trace.outputs, engine.outputs))
    assert trace.gradients.keys() == engine.gradients.keys()
    for name, gradient in trace.gradients.items():
        other = engine.gradients[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(gradient, other), name
