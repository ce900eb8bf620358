"""Forecasts of peak memory beside published ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from benchmarks.foresight.plans import blueprint_of, work_of
from benchmarks.foresight.rows import Case
from shardwise.errors import ShardwiseError
from shardwise.plan.forecast.memory import forecast
from shardwise.plan.schedule.events import Mode

QUANTISED = 0.53  # bytes of a weight of 4 bits, with its part of the scales


# What torch's allocator reserves of what is allocated at most: blocks of 2 MiB and more, of which
# parts stay free. torchtitan's pull request 165 has pairs of both from 1.2 to 1.4, in early 2024.
RESERVED = 1.1


def memory_errors(cases: Iterable[Case], others: dict[str, list[str]]) -> dict[Case, float]:
    """The forecast over what was published, less one; a case without a plan goes to ``others``."""
    errors: dict[Case, float] = {}
    for case in cases:
        try:
            errors |= {case: peak_of(case) / case.memory - 1} if case.memory else {}
        except ShardwiseError as reason:
            others.setdefault(str(reason), []).append(case.number)
    return errors


def settled(case: Case) -> Case:
    """The case with its blocks recomputed where no row tells, and it does not fit otherwise.

    Beside a host's memory that is nearly as fast, what does not fit may be there.
    """
    accelerator = case.machine.accelerator
    if case.tells or "C2C" in accelerator.host:
        return case
    tensors = replace(case, software=replace(case.software, allocated=True, device=True))
    with suppress(ShardwiseError):
        if peak_of(tensors) > accelerator.memory:
            return replace(case, software=replace(case.software, checkpointing="full"))
    return case


def peak_of(case: Case) -> float:
    """Bytes at most of one rank."""
    work = work_of(case, compiled=case.software.compiled)
    blueprint = replace(blueprint_of(case, case.shape.layers), device=torch.device("cuda"))
    frozen = case.shape.layers * case.shape.block_parameters * case.quantized
    narrowed = frozen * (_itemsize(case) - QUANTISED) / case.shards
    used = case.software
    # Where only the optimizer's state is split, gradients stay whole until the step.
    mode: Mode = "last" if case.strategy == "zero1" else "train"
    whole = forecast(blueprint, work.order, work, used.optimizer, mode)
    inputs = case.shape.layers * work.tokens * case.shape.width * 2  # of blocks, in bf16
    peak = max(whole.peak - narrowed - inputs * used.offloads, _summoned(case))
    if mode == "last" and used.sums == "bfloat16":
        peak -= case.shape.parameters * (_itemsize(case) - 2)
    if used.lists and not case.rank:
        copied = case.shape.parameters / case.shards * _itemsize(case)
        peak = max(peak, whole.between_steps + copied)
    peak = peak if used.allocated else peak * RESERVED
    return peak + case.machine.accelerator.reserved * used.device


def _summoned(case: Case) -> float:
    """Bytes while a checkpoint is read, where a rank gathers all of the model for it."""
    gathers = case.software.summons
    return gathers * case.shape.parameters * _itemsize(case) * (1 + 1 / case.shards)


def _itemsize(case: Case) -> int:
    stored: torch.dtype = getattr(torch, case.software.stored)
    return stored.itemsize
