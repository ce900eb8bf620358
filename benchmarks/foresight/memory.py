"""Forecasts of peak memory beside published ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

import torch

from benchmarks.foresight.plans import blueprint_of, work_of
from benchmarks.foresight.rows import Case
from shardwise.errors import ShardwiseError
from shardwise.plan.forecast.memory import forecast
from shardwise.plan.schedule.events import Event, Mode, Phase

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
    """Bytes at most of one rank: of tensors, of what the allocator keeps, and of the process."""
    used, tensors = case.software, _tensors(case)
    kept = tensors if used.allocated else tensors * RESERVED
    return kept + case.machine.accelerator.reserved * used.device


def _tensors(case: Case) -> float:
    """Bytes at most of tensors: in a pass, while a checkpoint is read, and while it steps."""
    work = work_of(case)
    blueprint = replace(blueprint_of(case, case.shape.layers), device=torch.device("cuda"))
    mode: Mode = "last" if _gradients_wait(case) else "train"
    whole = forecast(blueprint, work.order, work, case.software.optimizer, mode)
    less = _of_4_bits(case) + _in_host(case, work.tokens) + _of_narrow_gradients(case)
    forward = takewhile(lambda moment: _before_backward(moment.event), whole.moments)
    in_forward = max(moment.peak for moment in forward) + _of_earlier_micro_batches(case)
    peak = max(whole.peak, in_forward) - less
    return _in_buckets(case) + max(peak, _summoned(case), _over_lists(case, whole.between_steps))


def _gradients_wait(case: Case) -> bool:
    """Do gradients stay whole until the step? Those of one micro-batch only under ZeRO-1."""
    return case.strategy == "zero1" or (case.micro_batches > 1 and case.sums_once)


def _before_backward(event: Event | None) -> bool:
    return event is None or event.phase is Phase.FORWARD


def _of_earlier_micro_batches(case: Case) -> float:
    """Bytes of a rank's part of the gradients that a micro-batch finds when it begins."""
    if case.micro_batches == 1 or case.rank or _gradients_wait(case):
        return 0.0
    itemsize = 2 if case.software.reduce == "bfloat16" else _itemsize(case)
    return case.shape.parameters / case.shards * itemsize


def _of_4_bits(case: Case) -> float:
    """Bytes that frozen weights lack, which were counted as they are stored."""
    frozen = case.shape.layers * case.shape.block_parameters * case.quantized
    return frozen * (_itemsize(case) - QUANTISED) / case.shards


def _in_host(case: Case, tokens: int) -> float:
    """Bytes of the inputs of recomputed blocks, in bf16, that wait in the host's memory."""
    return case.shape.layers * tokens * case.shape.width * 2 * case.software.offloads


def _of_narrow_gradients(case: Case) -> float:
    """Bytes that gradients lack which wait in the dtype in which they are summed."""
    narrow = case.strategy == "zero1" and case.software.reduce == "bfloat16"
    return narrow * case.shape.parameters * (_itemsize(case) - 2)


def _in_buckets(case: Case) -> float:
    """Bytes of the buckets of torch's DistributedDataParallel, which last."""
    copied = case.software.buckets and not case.rank and case.ranks > 1
    return copied * case.shape.parameters * _itemsize(case)


def _over_lists(case: Case, at_rest: float) -> float:
    """Bytes while an optimizer goes through lists, with a copy of all that it steps."""
    copied = case.shape.parameters / case.shards * _itemsize(case)
    return (at_rest + copied) * (case.software.lists and not case.rank)


def _summoned(case: Case) -> float:
    """Bytes while a checkpoint is read, where a rank gathers all of the model for it."""
    gathers = case.software.summons
    return gathers * case.shape.parameters * _itemsize(case) * (1 + 1 / case.shards)


def _itemsize(case: Case) -> int:
    stored: torch.dtype = getattr(torch, case.software.stored)
    return stored.itemsize
