"""The disk space that a run will need, checked before its first step and not found out at a save.

A checkpoint is written before the oldest one is removed, so there is one more than
``checkpoint.save_total_limit`` for a while.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwise.checkpoint import folder
from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.recipe.recipe import Recipe
from shardwise.train.job import Job
from shardwise.train.length import times_due
from shardwise.train.memory_estimate import MOMENTS
from shardwise.train.optimizer import blocksize_of
from shardwise.train.records import plural


def check_disk(job: Job, checkpoints: Path) -> None:
    """Raise ``ConfigError`` if the checkpoints to come and the model do not fit on the disk.

    Args:
        checkpoints: the run's folder of checkpoints, which may hold some, or not exist.
    """
    parameters, state = checkpoint_bytes(job)
    existing = len(folder.checkpoints(checkpoints))
    number = max(1, most_at_once(job.recipe) - existing)
    needed = number * (parameters + state) + parameters
    existing_folder = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    free = shutil.disk_usage(existing_folder).free
    if needed > free:
        more = plural(number, "more checkpoint")
        raise ConfigError(
            f"run.folder {job.recipe.run.folder} has {size(free)} of free disk, and the run needs "
            f"{size(needed)}: {more} of {size(parameters + state)} at a time, "
            f"and the model of {size(parameters)}. {advice(job.recipe, number)}"
        )


def advice(recipe: Recipe, checkpoints: int) -> str:
    """Name what leaves room where ``checkpoints`` more and the model do not fit. Pure."""
    steps = ["name a folder on another disk."]
    if checkpoints > 1:
        steps.insert(0, "raise checkpoint.save_every or ")
    if checkpoints > 1 and recipe.checkpoint.save_total_limit != 1:
        steps.insert(0, "lower checkpoint.save_total_limit, ")
    return "".join(steps).capitalize()


def most_at_once(recipe: Recipe) -> int:
    """Count the checkpoints that lie on the disk at the same time. Pure."""
    config = recipe.checkpoint
    saves = times_due(1, recipe.run.steps, config.save_every) if config.save_every else 1
    if config.save_total_limit is None:
        return saves
    return min(saves, config.save_total_limit + config.keep_best + 1)


def checkpoint_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes that a checkpoint stores of parameters, and of optimizer state."""
    only_trained = job.recipe.adapter.rank is not None
    in_8_bits = blocksize_of(job.recipe.optimizer.name) > 0
    parameters = state = 0
    for bucket in job.sharded.buckets:
        numel, itemsize = bucket.layout.used, bucket.dtypes.stored.itemsize
        trained = bool(bucket.gradients.trained)
        parameters += numel * itemsize * (trained or not only_trained)
        state += MOMENTS * numel * (1 if in_8_bits else itemsize) * trained
        state += numel * max(itemsize, 4) * trained * (job.ema is not None)
    return parameters, state
