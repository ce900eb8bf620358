"""The record of a model that is built and sharded: its sizes, its schedule, and where it runs."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from shardwise.config.version import __version__
from shardwise.doctor.machine import device_name
from shardwise.launch.machine_memory import machine_memory
from shardwise.plan.printed import size
from shardwise.plan.spec import BucketSpec
from shardwise.train.batches import accumulation
from shardwise.train.data import Data
from shardwise.train.job import Job
from shardwise.train.learning_rate import preview
from shardwise.train.length import passes
from shardwise.train.records import Built, BuiltUnit
from shardwise.train.streams import StreamedRows


def built_record(job: Job, data: Data) -> Built:
    """The record of ``job`` as it was built."""
    recipe, ranks, training = job.recipe, job.sharded.comm.size, data.training
    epochs = None
    if not isinstance(training, StreamedRows):
        epochs = passes(recipe, recipe.run.steps, len(training))
    return Built(
        parameters=_parameters(job),
        strategy=job.sharded.placement.name,
        ranks=ranks,
        rows=recipe.batch.rows,
        micro=recipe.batch.micro,
        accumulation=accumulation(recipe.batch, ranks),
        context=recipe.data.context,
        steps=recipe.run.steps,
        epochs=epochs,
        warmup=recipe.optimizer.warmup_steps(recipe.run.steps),
        untimed=recipe.run.throughput_warmup,
        report=job.report,
        all_logits=job.all_logits,
        padded=recipe.data.format != "text" and recipe.data.packing != "concatenate",
        dtypes=job.sharded.layout.dtypes(),
        rates=preview(recipe.run.steps, recipe.optimizer),
        units=tuple(_units(job.sharded.layout.specs)),
        machine=f"{device_name(job.sharded.comm.device)}, {size(machine_memory())} of host memory",
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shardwise": __version__,
        },
    )


def _parameters(job: Job) -> int:
    """Number of the model's parameters; of quantised layers, not the bytes that hold them."""
    if job.recipe.model.source is None:
        return job.sharded.numel()
    from shardwise.hf.preparation import packed_elements

    return job.sharded.numel() + packed_elements(job.model)


def _units(specs: Iterable[BucketSpec]) -> Iterator[BuiltUnit]:
    for name, of_unit in groupby(specs, lambda spec: spec.unit):
        buckets = list(of_unit)
        yield BuiltUnit(
            name,
            sum(spec.layout.used for spec in buckets),
            sum(spec.layout.numel * spec.dtypes.param.itemsize for spec in buckets),
            sum(spec.rest_nbytes for spec in buckets),
        )
