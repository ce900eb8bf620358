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
    with suppress(ShardwiseError):
        if peak_of(case) > accelerator.memory - accelerator.reserved:
            return replace(case, software=replace(case.software, checkpointing="full"))
    return case


def peak_of(case: Case) -> float:
    """Bytes at most of one rank."""
    work = work_of(case, compiled=case.software.compiled)
    blueprint = replace(blueprint_of(case, case.shape.layers), device=torch.device("cuda"))
    frozen = case.shape.layers * case.shape.block_parameters * case.quantized
    narrowed = frozen * (_itemsize(case) - QUANTISED)
    peak = (
        forecast(blueprint, work.order, work, case.software.optimizer).peak - narrowed / case.shards
    )
    inputs = case.shape.layers * work.tokens * case.shape.width * 2  # of blocks, in bf16
    peak = max(peak - inputs * case.software.offloads, _summoned(case))
    return peak if case.software.allocated else peak * RESERVED


def _summoned(case: Case) -> float:
    """Bytes while a checkpoint is read, where a rank gathers all of the model for it."""
    gathers = case.software.summons
    return gathers * case.shape.parameters * _itemsize(case) * (1 + 1 / case.shards)


def _itemsize(case: Case) -> int:
    stored: torch.dtype = getattr(torch, case.software.stored)
    return stored.itemsize
