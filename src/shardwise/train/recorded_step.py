"""One step as rank 0 took it: when each event was done, and the bytes of each kind then.

It is the last step that tokens/s leaves out, so recording it costs no step that is measured; but
not the first, which is no step as planned. The file `step.json` has it for `shardwise report`:

    {"step": 3, "kinds": ["gathered", …], "moments": [[seconds, bytes of each kind, event], …],
     "planned": [[the engine's bytes, all], …], "planned_most": {"gathered": …}}

An event is null where the step begins and ends, or ``[op, unit, phase, reason]``. What is planned
is there if the run was planned: for each moment, and of each kind at most.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardwise.memory.parameters import Bucket
from shardwise.optim.blockwise import TABLES, without_tables
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.schedule.events import Event, Phase
from shardwise.torch_internals import disable_torch_function, get_grad
from shardwise.train.folder import STEP
from shardwise.train.footprint import storage_bytes
from shardwise.train.foresight import OTHERS, RunPlan
from shardwise.train.job import Job
from shardwise.train.records import Warned
from shardwise.train.run_logger import RunLogger

KINDS = (Kind.GATHERED, Kind.PARAMETERS, Kind.BUCKETS, Kind.GRADIENTS, Kind.OPTIMIZER)
"""Kinds of the engine's memory where it computes; what is kept in host memory beside that is not
in them."""


@contextmanager
def recorded(
    job: Job, step: int, logger: RunLogger, plan: RunPlan | None
) -> Iterator[dict[str, Any]]:
    """Record step ``step``, which is taken inside, and write its file. Rank 0 alone does so.

    Returns:
        The file's content, which is there when the block has ended.
    """
    content: dict[str, Any] = {}
    if logger.folder is None:
        yield content
        return
    recording, listeners = _Recording(job), job.sharded.runtime.listeners
    listeners.append(recording.add)
    try:
        recording.add(None)
        yield content
        recording.add(None)
    finally:
        listeners.remove(recording.add)
    content |= {"step": step, "kinds": [*KINDS, OTHERS], "moments": recording.moments}
    if plan is not None:
        content |= {"planned": plan.beside(recording.moments), "planned_most": plan.most}
    try:
        logger.folder.write_text(STEP, json.dumps(content))
    except OSError as error:
        logger.log(Warned(f"{STEP}, for `shardwise report`, is not written: {error.strerror}"))


_BETWEEN = Phase.BACKWARD, Phase.FORWARD


class _Recording:
    """Moments of a step; an event changes the bytes of its own unit only."""

    def __init__(self, job: Job) -> None:
        self.moments: list[list[Any]] = []
        self._job, self._device = job, job.sharded.comm.device
        self._buckets: dict[str, list[Bucket]] = {}
        for bucket in job.sharded.buckets:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        self._kept: dict[str, list[int]] = {}
        states = job.optimizer.state.values()
        tables = [state[key] for state in states for key in TABLES if key in state]
        self._tables = storage_bytes(t for t in tables if t.device == self._device)  # all units'
        self._others = 0  # allocated before the step began
        self._start = perf_counter()

    def add(self, event: Event | None) -> None:
        """Add what there is at this moment; where a pass begins and at the end, of all units."""
        seconds = perf_counter() - self._start
        before = self.moments[-1][2] if self.moments else None
        # Between passes the means of all units become, or go to, gradients: no event tells of that.
        is_inside = event and before and (before.phase, event.phase) != _BETWEEN
        for unit in [event.unit] if event and is_inside else self._buckets:
            self._kept[unit] = self._bytes_of(self._buckets.get(unit, []))
        kinds = list(map(sum, zip(*self._kept.values(), strict=True)))
        kinds[KINDS.index(Kind.OPTIMIZER)] += self._tables
        others = allocated_bytes(self._device) - sum(kinds)
        if not self.moments:
            self._others = others
        self.moments.append([seconds, [*kinds, max(0, others - self._others)], event])

    def _bytes_of(self, buckets: list[Bucket]) -> list[int]:
        """Bytes of a unit by kind; a storage counts once, for the first kind that has it.

        Shards that are slices of full buckets are parameters all the same.
        """
        counted: list[Tensor] = []
        totals = [0]
        for tensors in self._tensors(buckets):
            counted += [t for t in tensors if t is not None and t.device == self._device]
            totals.append(storage_bytes(counted))
        nbytes = [after - before for before, after in pairwise(totals)]
        slices = sum(bucket.shard.nbytes for bucket in buckets if bucket.allocation.aliased)
        full = nbytes[0] - sum(map(_of_peers, buckets))
        return [full - slices, nbytes[1] + slices, *nbytes[2:]]

    def _tensors(self, buckets: list[Bucket]) -> Iterator[list[Tensor | None]]:
        """The tensors of each of ``KINDS``."""
        params = [param for bucket in buckets for param in bucket.params]
        states = (without_tables(self._job.optimizer.state.get(param, {})) for param in params)
        with disable_torch_function():
            grads = [get_grad(param) for param in params]
        yield [bucket.full for bucket in buckets]
        yield [tensor for bucket in buckets for tensor in (bucket.shard, bucket.staged)]
        yield [bucket.gradients.full for bucket in buckets]
        gradients = [bucket.gradients for bucket in buckets]
        aside = [grad for own in gradients for grad in own.aside.values()]  # during a backward pass
        means = [own.mean for own in gradients]
        sums = [own.reducing.out for own in gradients if own.reducing is not None]
        yield [
            *grads,
            *aside,
            *sums,
            *(part for mean in means for part in (mean.result, mean.stored, mean.kept.memory)),
        ]
        yield [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _of_peers(bucket: Bucket) -> int:
    """Bytes of a full bucket that ranks map, without the part that counts for this rank."""
    if not bucket.allocation.shared or bucket.full is None:
        return 0
    return bucket.full.nbytes - bucket.full.nbytes // bucket.spec.shard.size


class _MallInfo2(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "fordblks", "keepcost")]


def allocated_bytes(device: torch.device) -> int:
    """Bytes that are allocated: by torch on an accelerator, by glibc on a CPU, or 0 without it."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
