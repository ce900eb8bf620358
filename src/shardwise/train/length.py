"""The length of a run, and when it validates and saves: epochs as steps. Pure.

An epoch is as many steps as it takes until every row of the training split has been seen; the rows
of the next epoch begin within its last step, so nothing is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.section import times
from shardwise.train.records import plural


def in_steps(recipe: Recipe, rows: int) -> Recipe:
    """The recipe with lengths in steps where it has them in epochs.

    Args:
        rows: of the training split.

    Raises:
        ConfigError: they are too few for other workers.
    """
    run, epoch = recipe.run, math.ceil(rows / recipe.batch.rows)
    by_epoch = run.eval_every == "epoch"
    steps = times(run.epochs, Fraction(rows, recipe.batch.rows)) if run.epochs else run.steps
    check_exchange(recipe, steps)
    length = {
        "steps": steps,
        "eval_every": epoch if by_epoch else run.eval_every,
        "eval_delay": times(run.eval_delay, epoch) if by_epoch else run.eval_delay,
    }
    saving = recipe.checkpoint
    every = epoch if saving.save_every == "epoch" else saving.save_every
    return recipe.model_copy(
        update={
            "run": run.model_copy(update=length),
            "checkpoint": saving.model_copy(update={"save_every": every}),
        }
    )


def check_exchange(recipe: Recipe, steps: int) -> None:
    """Raise ``ConfigError`` where so many steps end before workers have exchanged all units."""
    every = recipe.outer.every
    if recipe.outer.method != "none" and every > steps:
        raise ConfigError(
            f"outer.every is {every} and the run has {plural(steps, 'step')}: workers would never "
            "exchange the whole model, and each would end with another. Write outer.every: "
            f"{steps}, or less."
        )


def passes(recipe: Recipe, steps: int, rows: int) -> float:
    """Passes over the ``rows`` of the training split in ``steps`` steps of each worker."""
    return steps * recipe.batch.rows * max(1, len(recipe.outer.workers)) / rows


def is_multiple(step: int, every: int | str) -> bool:
    """Is something due that happens ``every`` so many steps? 0 = never."""
    return isinstance(every, int) and every > 0 and step % every == 0


def times_due(step: int, last: int, every: int | str, delay: float = 0) -> int:
    """Count how often something is due from ``step`` to ``last``, where it is due in any case.

    Args:
        delay: it is not due before this step, except at the end.
    """
    if not isinstance(every, int) or every < 1:
        return 1
    first = max(step, math.ceil(delay), 1)
    return max(0, last // every - (first - 1) // every) + (last % every != 0 or last < first)


def notes(recipe: Recipe) -> Iterator[str]:
    """Name what a recipe in steps asks for and a reader might not expect."""
    run, warmup = recipe.run, recipe.optimizer.warmup
    if warmup >= run.steps:
        steps, rises = plural(run.steps, "step"), recipe.optimizer.warmup_steps(run.steps)
        yield (
            f"optimizer.warmup is {warmup} and the run has {steps}: the learning rate "
            f"rises for {rises}, and is at its peak in the last."
        )
    chosen = run.eval_delay or run.patience or recipe.checkpoint.keep_best
    if chosen and times_due(1, run.steps, run.eval_every, run.eval_delay) == 1:
        is_delayed = times_due(1, run.steps, run.eval_every) > 1
        yield (
            f"run.eval_{'delay' if is_delayed else 'every'} leaves one validation, after the last "
            f"of {plural(run.steps, 'step')}, and nothing to choose from; make it smaller."
        )
    every = recipe.outer.every
    if recipe.outer.method != "none" and run.steps % every:
        yield (
            f"outer.every {every} does not divide the {run.steps} steps: what workers train after "
            f"step {run.steps - run.steps % every} they do not exchange, and their models differ "
            "by it."
        )
