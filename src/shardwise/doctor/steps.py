"""Cost of a training step on this device, under each strategy: its time, and its peak of memory.

The plan adds up the peak beforehand, without activations, of which the model here has few. What
was in use, the device's allocator has counted; for a CPU nothing does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.api.shard import shard
from shardwise.comm.protocol import Comm
from shardwise.config.strategies import STRATEGIES
from shardwise.plan.draw import draw
from shardwise.plan.forecast.memory import forecast
from shardwise.plan.order import guess

WARM, STEPS = 3, 20  # steps before anything is measured, and measured
LAYERS, WIDTH, ROWS = 8, 1_024, 8


@dataclass(frozen=True)
class StepCost:
    """One strategy on one rank.

    Attributes:
        milliseconds: of a step until the device has finished it, the median.
        planned: bytes in use on the device at most, without activations.
        peak: the same as the device's allocator has counted it; ``None`` on a CPU.
    """

    strategy: str
    milliseconds: float
    planned: int
    peak: int | None


def step_costs(comm: Comm) -> Iterator[StepCost]:
    """The cost of each strategy that needs no mesh, in turn. A collective."""
    for strategy in STRATEGIES:
        yield _step_cost(comm, strategy)


def planned_peak(model: nn.Module, strategy: str, ranks: tuple[int, int], **options: Any) -> int:
    """Bytes that a rank has on its device at most in a step with AdamW, without activations.

    Args:
        model: before it is sharded.
        strategy, ranks, options: as for ``draw``.
    """
    blueprint = draw(model, strategy, ranks=ranks, **options)
    return forecast(blueprint, guess(model, blueprint.units.unit_names)).peak


def _step_cost(comm: Comm, strategy: str) -> StepCost:
    gc.collect()  # the model before it
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    model = nn.Sequential(*blocks).to(comm.device)
    planned = planned_peak(model, strategy, (comm.rank, comm.size))
    shard(model, strategy, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH, device=comm.device)
    for _ in range(WARM):
        _seconds(model, optimizer, x)
    counts = None if comm.device.type == "cpu" else torch.get_device_module(comm.device)
    if counts is not None:
        counts.reset_peak_memory_stats(comm.device)
    seconds = median(_seconds(model, optimizer, x) for _ in range(STEPS))
    peak = None if counts is None else counts.max_memory_allocated(comm.device)
    return StepCost(strategy, 1e3 * seconds, planned, peak)


def _seconds(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """Take a step, and wait for the device."""
    start = perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if x.device.type != "cpu":
        torch.accelerator.current_stream(x.device).record_event().synchronize()
    return perf_counter() - start
