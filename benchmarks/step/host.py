"""What an engine costs the host per unit and step, and what its optimizer costs.

One process is rank 0 of a world of 8 that does not exist: collectives cost next to nothing, so
what a step takes beyond the same step of a plain model is the engine's Python. Each engine has
a process of its own, where its steps alternate with those of a plain model. The clock is the
thread's processor time, so that other programs on the machine are not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.harness.command import Log
from benchmarks.harness.report import Column, Table
from benchmarks.harness.workers import Worker, on_ranks
from benchmarks.step.engines import flat_optimizer_for, optimizer_for
from shardwise.comm.fake import FakeComm
from shardwise.comm.protocol import Completed, Label, OnReceived, Pending

WORLD = 8
UNITS = 8
SIDE = 16  # every parameter is SIDE × SIDE
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
    rows = []
    for engine in engines:
        log(f"host time: {engine}")
        rows += [(engine, *row) for row in on_ranks(1, _host, engine, PARAMS, steps)[0]]
    title = f"Host time: µs per unit and step beyond a plain model, fake world {WORLD}"
    return Table(title, HOST, tuple(rows))


def update_table(engines: Sequence[str], steps: int, log: Log) -> Table:
    """Milliseconds of ``optimizer.step()`` in its variants.

    Torch's ``"default"`` (the loop on CPU), ``"foreach"`` and ``"fused"``; ``"flat"`` is
    ``sw.optim.AdamW``, for our engines.
    """
    rows = []
    for engine in engines:
        log(f"optimizers: {engine}")
        rows += [(engine, *row) for row in on_ranks(1, _update, engine, steps)[0]]
    title = f"AdamW on {UNITS * SMALL} parameters of 16 × 16, fake world {WORLD}: ms per step()"
    return Table(title, UPDATE, tuple(rows))


class SilentComm(FakeComm):
    """Nothing is moved: what is in the memory of peers is left as it is.

    As in torch's fake process group, which the rival has: what is measured is the engine.
    """

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        """Nothing is gathered."""
        self.counters.sent(label.op, full.nbytes * (self.size - 1) // self.size)
        return Completed()

    def exchange(self, full: Tensor, use: OnReceived, label: Label) -> Pending:  # noqa: ARG002
        """Nothing is summed."""
        self.counters.sent(label.op, full.nbytes * (self.size - 1) // self.size)
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


class Chains(nn.Module):
    """``UNITS`` of them, one unit each; the model itself holds nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain(count) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        """``[SIDE, SIDE]`` → the same."""
        for block in self.blocks:
            x = block(x)
        return x


def sharded(engine: str, model: Chains) -> Chains:
    """The model, sharded by an engine over the world that does not exist."""
    if engine == "plain":
        return model
    if not engine.startswith("fsdp2"):
        _shardwise(engine, model)
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _pretend_group()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=engine == "fsdp2")
    fully_shard(model, mesh=mesh, reshard_after_forward=engine == "fsdp2")
    return model


def _shardwise(strategy: str, model: Chains) -> sw.Sharded:
    return sw.shard(model, strategy, wrap=sw.wrap.by_class(Chain), comm=SilentComm(0, WORLD))


def _pretend_group() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)


def stepper(model: nn.Module) -> Callable[[], None]:
    """Forward and backward, with no gradients left."""
    x = torch.randn(SIDE, SIDE)

    def step() -> None:
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None

    return step


# ---- in the worker -------------------------------------------------------------------------


def _host(worker: Worker, engine: str, params: Sequence[int], steps: int) -> None:
    gc.disable()
    rows = []
    for count in params:
        model = sharded(engine, Chains(count))
        plain, whole = _seconds(stepper(Chains(count)), stepper(model), steps)
        extra = median(a - b for a, b in zip(whole, plain, strict=True))
        seconds = extra, min(whole) - min(plain), median(plain)
        rows.append((count, *(1e6 / UNITS * each for each in seconds)))
    worker.send(rows)


def _seconds(
    plain: Callable[[], None], whole: Callable[[], None], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, alternating, after steps that set things up."""
    for _ in range(3):
        plain()
        whole()
    first, second = [], []
    for number in range(steps):
        _collect_garbage(number)
        first.append(_timed(plain))
        second.append(_timed(whole))
    return first, second


def _collect_garbage(number: int) -> None:
    """Between steps, and seldom: each time empties the processor's caches."""
    if number % 10 == 0:
        gc.collect()


def _timed(what: Callable[[], Any]) -> float:
    start = thread_time()
    what()
    return thread_time() - start


def _update(worker: Worker, engine: str, steps: int) -> None:
    gc.disable()
    options: dict[str, dict[str, bool]] = {"default": {}}
    options |= {name: {name: True} for name in ("foreach", "fused")}
    # The models are kept: an engine looks after its parameters only as long as there is one.
    updates = {name: _updater(engine, each) for name, each in options.items()}
    if engine != "plain" and not engine.startswith("fsdp2"):
        updates["flat"] = _flat_updater(engine)
    times: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(steps):
        _collect_garbage(number)
        for name, (_, optimizer) in updates.items():
            times[name].append(_timed(optimizer.step))
    worker.send([(name, median(each) * 1e3, min(each) * 1e3) for name, each in times.items()])


def _updater(engine: str, options: dict[str, Any]) -> tuple[Chains, Optimizer]:
    """A model with gradients in place, after a step that made its optimizer's state."""
    model = sharded(engine, Chains(SMALL))
    return _stepped(model, optimizer_for(model.parameters(), "adamw", **options))


def _flat_updater(strategy: str) -> tuple[Chains, Optimizer]:
    """The same with our own optimizer."""
    model = Chains(SMALL)
    return _stepped(model, flat_optimizer_for(_shardwise(strategy, model), "adamw"))


def _stepped(model: Chains, optimizer: Optimizer) -> tuple[Chains, Optimizer]:
    model(torch.randn(SIDE, SIDE)).sum().backward()
    optimizer.step()
    return model, optimizer
