"""A run's exchange with other workers. Each is a run of its own, with a folder and checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.outer.diloco import DiLoCo, place_of
from shardwise.outer.schedule import OuterSchedule
from shardwise.recipe.recipe import Recipe
from shardwise.train.job import Job
from shardwise.train.length import check_exchange
from shardwise.train.worker import Exchanged, worker_of


def check_outer(recipe: Recipe) -> None:
    """Raise ``ConfigError`` where workers cannot exchange by it, before anything is read."""
    config = recipe.outer
    if config.method != "none":
        OuterSchedule.spread({}, config.every, config.delay)
        place_of(config.workers, worker_of(config).number)
    if recipe.run.epochs is None:  # else it is known how many steps there are when the text is read
        check_exchange(recipe, recipe.run.steps)


class Outer:
    """The exchange with other workers; without any it does nothing.

    ``stops``: asked while it waits for them, whether the run is to stop.
    """

    def __init__(self, job: Job, stops: Callable[[], bool]) -> None:
        config = job.recipe.outer
        self._every, self._diloco = config.every, None
        if config.method == "diloco":
            options = config.model_dump(exclude={"method", "workers", "worker"})
            number = worker_of(config).number
            self._diloco = DiLoCo(
                job.sharded,
                job.optimizer,
                workers=config.workers,
                worker=number,
                stops=stops,
                **options,
            )

    @property
    def steps(self) -> int:
        """Local steps that the workers have taken; 0 without others."""
        return self._diloco.steps if self._diloco else 0

    @property
    def has_left(self) -> bool:
        """Did it leave the others while it waited for them?"""
        return self._diloco is not None and self._diloco.has_left

    def step(self) -> Exchanged | None:
        """Exchange what is due; returns what to log at the end of a round."""
        if (diloco := self._diloco) is None:
            return None
        diloco.step()
        if diloco.steps % self._every or diloco.has_left:
            return None
        sent, received = diloco.nbytes.values()
        return Exchanged(diloco.steps, tuple(diloco.workers), sent, received)

    def finish(self) -> None:
        """Nothing is in flight any more, so that a checkpoint continues exactly."""
        if self._diloco is not None:
            self._diloco.finish()

    def close(self) -> None:
        """Leave the other workers."""
        if self._diloco is not None:
            self._diloco.close()
