"""Demonstrations with numbers: two ranks, as threads, really do what a text says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shardwise.api.shard import shard
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.reduction import Reduction
from shardwise.comm.transports import threads
from shardwise.config.strategies import STRATEGIES
from shardwise.plan.printed import size
from shardwise.plan.units.wrap import automatic

WORLD = 2


def _text(tensor: Tensor) -> str:
    return str([round(value, 4) for value in tensor.flatten().tolist()])


def _each(fn: Callable[[Comm], str]) -> list[str]:
    """``fn``'s line of each rank."""
    return [f"rank {rank}: {line}" for rank, line in enumerate(threads.run(WORLD, fn))]


def _mean(comm: Comm, given: Tensor, divisor: float = float(WORLD)) -> Tensor:
    reduction = Reduction(given.dtype, given.dtype, "demo", 1.0, divisor)
    started = reduction.start(given.clone(), comm, Label("demo"))
    started.pending.wait()
    return started.out


def sharding() -> list[str]:
    """A tensor of six numbers."""
    whole = torch.arange(6.0)
    pieces = whole.view(WORLD, 3)
    ranks = _each(lambda comm: f"holds {_text(pieces[comm.rank])}, 12 of 24 bytes")
    return [f"whole:  {_text(whole)}", *ranks]


def all_gather() -> list[str]:
    """Three numbers of each rank become six on each."""

    def rank(comm: Comm) -> str:
        own = torch.arange(3.0) + 3 * comm.rank
        whole = comm.gather_rows(own, Label("demo"))
        sent = comm.counters.bytes_sent["demo"]
        return f"gives {_text(own)}, has {_text(whole)}, sent {sent} bytes"

    return _each(rank)


def reduce_scatter() -> list[str]:
    """Four numbers of each rank; each keeps two of the mean."""

    def rank(comm: Comm) -> str:
        given = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**comm.rank
        mean = _mean(comm, given)
        sent = comm.counters.bytes_sent["demo"]
        return f"gives {_text(given)}, has {_text(mean)} of the mean, sent {sent} bytes"

    return _each(rank)


def all_reduce() -> list[str]:
    """A reduce-scatter, then an all-gather."""

    def rank(comm: Comm) -> str:
        given = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**comm.rank
        piece = _mean(comm, given, divisor=1.0)
        whole = comm.gather_rows(piece, Label("demo"))
        sent = comm.counters.bytes_sent["demo"]
        return f"gives {_text(given)}, has {_text(piece)}, then {_text(whole)}, sent {sent} bytes"

    return _each(rank)


def _counted(strategy: str) -> str:
    """A step of four layers of 16 KiB each: what rank 0 keeps, and what it sent."""

    def rank(comm: Comm) -> str:
        layers, counters = (nn.Linear(64, 64, bias=False) for _ in range(4)), comm.counters
        model = nn.Sequential(*layers)
        shard(model, strategy, comm=comm, wrap=automatic(0), unsharded=0)  # as layers of size are
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counters.reset()
        loss = model(torch.ones(2, 64)).sum()
        forward = counters.calls.get("gather", 0)
        loss.backward()
        backward = counters.calls.get("gather", 0) - forward
        states = [value for state in optimizer.state.values() for value in state.values()]
        grads = [param.grad for param in model.parameters()]
        keeps = sum(t.nbytes for t in (*model.parameters(), *grads, *states) if t is not None)
        return (
            f"{strategy:<14} keeps {size(keeps):>9}, gathers {forward} + {backward}, "
            f"reduces {counters.calls['reduce']}, sends {size(sum(counters.bytes_sent.values()))}"
        )

    return threads.run(WORLD, rank)[0]


def _steps(strategies: Iterable[str]) -> list[str]:
    title = "A step of four layers of 16 KiB each, AdamW; gathers in forward + backward:"
    return [title, *map(_counted, strategies)]


def fsdp_against_ddp() -> list[str]:
    """The same step under both."""
    return _steps(("no_shard", "full_shard"))


def zero_stages() -> list[str]:
    """The same step under each stage."""
    return _steps(STRATEGIES)


def tensor_parallel() -> list[str]:
    """``x @ w`` with ``w`` cut by rows: each rank has a part of the sum."""
    x, w = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.arange(8.0).view(4, 2)

    def rank(comm: Comm) -> str:
        columns = slice(2 * comm.rank, 2 * comm.rank + 2)
        part = x[:, columns] @ w[columns]
        total = comm.gather_rows(part.flatten(), Label("demo")).sum(0)
        return f"x[:, {columns.start}:{columns.stop}] @ w[…] = {_text(part)}, sum {_text(total)}"

    return [f"one rank: x @ w = {_text(x @ w)}", *_each(rank)]


def pipeline() -> list[str]:
    """Two stages, four micro-batches, forward alone."""
    stages, micro = WORLD, 4
    share = (stages - 1) / (micro + stages - 1)
    rows = [
        f"rank {s}: {'. ' * s}{' '.join(map(str, range(micro)))}{' .' * (stages - 1 - s)}"
        for s in range(stages)
    ]
    return [*rows, f"idle: ({stages} - 1) / ({micro} + {stages} - 1) = {share:.0%} of the time"]


def averaging() -> list[str]:
    """40,000 + 40,000 in fp16."""

    def rank(comm: Comm) -> str:
        given = torch.full((WORLD,), 40_000.0, dtype=torch.float16)
        after = _mean(comm, given)
        before = _mean(comm, given / WORLD, divisor=1.0)
        return f"gives 40000; sum, then divide: {_text(after)}; divide, then sum: {_text(before)}"

    return _each(rank)


def spmd() -> list[str]:
    """The same function on both ranks."""
    return _each(lambda comm: f"RANK={comm.rank} LOCAL_RANK={comm.rank} WORLD_SIZE={comm.size}")


_DEMOS = (
    *(sharding, all_gather, reduce_scatter, all_reduce, fsdp_against_ddp, zero_stages),
    *(tensor_parallel, pipeline, averaging, spmd),
)


def demonstrate(name: str) -> list[str]:
    """The lines of the demonstration of this name, run now."""
    return {demo.__name__: demo for demo in _DEMOS}[name]()
