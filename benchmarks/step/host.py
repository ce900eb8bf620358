"""What an engine costs the host per unit and step, and what its optimizer costs.

One process is rank 0 of a world of 8 that does not exist: collectives cost next to nothing, so
what a step takes beyond the same step of a plain model is the engine's Python. Each engine has
a process of its own, where its steps alternate with those of a plain model. The clock is the
thread's processor time, so that other programs on the machine are not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.harness.command import Log
from benchmarks.harness.report import Cell, Column, Table
from benchmarks.harness.workers import Worker, on_ranks
from benchmarks.step.engines import ADAMW
from shardwise.comm.protocol import Completed, Label, OnReceived, Pending
from tests.fake import FakeComm

WORLD = 8
UNITS = 8
SIDE = 16  # every parameter is SIDE × SIDE
WARM_UP = 3  # steps
HOSTED = ("full_shard", "shard_grad_op", "fsdp2", "fsdp2_keep")
PARAMS = (1, 10, 40)  # in a unit
SMALL = 40  # parameters in a unit where the optimizer is timed
HOST = (
    Column("engine"), Column("params a unit"), Column("median", ".0f"), Column("min", ".0f"),
    Column("plain", ".0f"),
)  # fmt: skip
UPDATE = (Column("engine"), Column("variant"), Column("median", ".3f"), Column("min", ".3f"))


def host_table(engines: Sequence[str], steps: int, log: Log) -> Table:
    """Microseconds per unit and step, beyond a plain model.

    The median of the differences between a step and the plain step before it, the difference of
    the fastest ones, and the plain step itself.
    """
    title = f"Host time: µs per unit and step beyond a plain model, fake world {WORLD}"
    return Table(title, HOST, _rows("host time", _host, engines, (steps, PARAMS), log))


def update_table(engines: Sequence[str], steps: int, log: Log) -> Table:
    """Milliseconds of ``optimizer.step()``: torch's loop, its other variants, ``sw.optim``'s."""
    title = f"AdamW on {UNITS * SMALL} parameters of 16 × 16, fake world {WORLD}: ms per step()"
    return Table(title, UPDATE, _rows("optimizers", _update, engines, (steps,), log))


def _rows(
    what: str, fn: Callable[..., None], engines: Sequence[str], args: tuple[Any, ...], log: Log
) -> tuple[tuple[Cell, ...], ...]:
    rows = []
    for engine in engines:
        log(f"{what}: {engine}")
        rows += [(engine, *row) for row in on_ranks(1, fn, engine, *args)[0]]
    return tuple(rows)


class SilentComm(FakeComm):
    """Nothing is moved, as in torch's fake process group, which the rival has."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        """Nothing is gathered."""
        self.counters.sent(label.op, full.nbytes - full.nbytes // self.size)
        return Completed()

    def exchange(
        self,
        full: Tensor,
        on_received: OnReceived,  # noqa: ARG002
        label: Label,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Pending:
        """Nothing is summed."""
        self.counters.sent(label.op, full.nbytes - full.nbytes // self.size)
        return Completed()


# ---- the model -----------------------------------------------------------------------------


class Chain(nn.Module):
    """``count`` square matrices, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """``[SIDE, SIDE]`` → the same."""
        for matrix in self.matrices:
            x = x @ matrix
        return x


def chains(count: int) -> nn.Sequential:
    """``UNITS`` of them, one unit each."""
    return nn.Sequential(*(Chain(count) for _ in range(UNITS)))


def sharded(engine: str, model: nn.Sequential) -> sw.Sharded | None:
    """Shard the model by an engine over the world that does not exist."""
    if engine in ("full_shard", "shard_grad_op"):
        # Units as small as these would stay gathered: they stand for large ones.
        wrap, comm = sw.wrap.by_class(Chain), SilentComm(0, WORLD)
        return sw.shard(model, engine, wrap=wrap, comm=comm, unsharded=0)
    if engine != "plain":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        for module in (*model, model):
            mesh = init_device_mesh("cpu", (WORLD,))
            fully_shard(module, mesh=mesh, reshard_after_forward=engine == "fsdp2")
    return None


# ---- in the worker -------------------------------------------------------------------------


def _host(worker: Worker, engine: str, steps: int, params: Sequence[int]) -> None:
    rows = []
    for count in params:
        model = chains(count)
        sharded(engine, model)
        calls = {"plain": _stepper(chains(count)), engine: _stepper(model)}
        seconds = _alternating(calls, WARM_UP + steps)
        plain, whole = (seconds[name][WARM_UP:] for name in ("plain", engine))
        extra = median(a - b for a, b in zip(whole, plain, strict=True))
        each = extra, min(whole) - min(plain), median(plain)
        rows.append((count, *(1e6 / UNITS * value for value in each)))
    worker.send(rows)


def _stepper(model: nn.Module) -> Callable[[], None]:
    """Forward and backward, with no gradients left."""
    x = torch.randn(SIDE, SIDE)

    def step() -> None:
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None

    return step


def _alternating(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for number in range(rounds):
        if number % 10 == 0:  # seldom: it empties the processor's caches
            gc.collect()
        for name, call in calls.items():
            start = thread_time()
            call()
            seconds[name].append(thread_time() - start)
    return seconds


def _update(worker: Worker, engine: str, steps: int) -> None:
    # The models are kept: an engine looks after its parameters only as long as there is one.
    kept = list(_variants(engine))
    calls = {name: optimizer.step for name, _, optimizer in kept}
    seconds = _alternating(calls, steps)
    worker.send([(name, median(each) * 1e3, min(each) * 1e3) for name, each in seconds.items()])


def _variants(engine: str) -> Iterator[tuple[str, nn.Module, Optimizer]]:
    """A model with gradients, and an optimizer that has taken a step, for each variant."""
    for name in ("default", "foreach", "fused", "flat"):
        model = chains(SMALL)
        handle = sharded(engine, model)
        if name != "flat":
            options: dict[str, Any] = {} if name == "default" else {name: True}
            optimizer: Optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, **options)
        elif handle is not None:
            optimizer = sw.optim.AdamW(handle, **ADAMW)
        else:
            continue
        model(torch.randn(SIDE, SIDE)).sum().backward()
        optimizer.step()
        yield name, model, optimizer
