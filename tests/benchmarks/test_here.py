"""Forecasts beside what this machine takes."""

from __future__ import annotations

import torch

from benchmarks.here.run import notes_of
from benchmarks.here.subjects import forecast_of
from benchmarks.models import ON_CPU
from shardwise.plan.forecast.machine import known


def test_a_task_is_a_question_with_its_own_batch_and_loss() -> None:
    task = ON_CPU["tiny"]
    forecast = forecast_of(task, known().machine("H100", 2), "full_shard")
    inputs, _ = task.batch(torch.Generator())
    assert forecast.time.work.tokens == inputs.numel()
    assert forecast.candidate.micro_batch == len(inputs)


def test_the_last_line_sums_up_how_far_forecasts_are_off() -> None:
    rows = [("a", "zero1", "messages", 10.0, 11.0, off, "host") for off in (-20.0, 10.0, 15.0)]
    assert (
        notes_of(rows)[-1] == "foresight here: 3 step times, median 15.0%, p90 19.0%, bias +10.0%"
    )
