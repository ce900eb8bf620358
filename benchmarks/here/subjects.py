"""What is forecast and measured: a task as a question, and this machine as a calibration has it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.workers import Worker, on_ranks
from benchmarks.models import Task
from shardwise.comm.machine.connect import over
from shardwise.doctor.calibrate import calibrate
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import Machine, known
from shardwise.plan.forecast.planner import Forecast, Planner
from shardwise.plan.forecast.question import Question
from shardwise.train.foresight import HERE


def calibrated(world: int, transport: str) -> Machine:
    """This machine, as ``shardwise plan --calibrate`` measures it on so many ranks."""
    entry = on_ranks(world, _calibrate, transport)[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.toml"
        file.write_text(entry, "utf-8")
        return known().with_file(file).machine(HERE, world)


def _calibrate(worker: Worker, transport: str) -> None:
    with worker.group():
        worker.send(calibrate(over(dist.group.WORLD, transport=transport), HERE))


class _Returns(nn.Module):
    """A model that was called."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any) -> Any:
        return self.output


def forecast_of(
    task: Task, machine: Machine, strategy: str, shared: bool = False, recompute: int = 0
) -> Forecast:
    """The forecast of a task's step on all ranks of ``machine``; ``shared``: of full buckets."""
    with torch.device("meta"):
        model = task.build()
    batch = tuple(tensor.to("meta") for tensor in task.batch(torch.Generator()))

    def loss(output: Any) -> Tensor:
        return task.loss(_Returns(output), batch)  # a task's loss calls its model

    question = Question(
        model, lambda _: (batch[:1], {}), machine, machine.per_host, loss=loss, shared=shared
    )
    return Planner(question).forecast(Candidate(strategy, len(batch[0]), recompute=recompute))
