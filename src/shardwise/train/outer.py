"""A run's exchange with other workers. Each is a run of its own, with a folder and checkpoints."""

from __future__ import annotations

from shardwise.outer.diloco import DiLoCo
from shardwise.train.job import Job
from shardwise.train.worker import Exchanged, worker_of


class Outer:
    """The exchange with other workers; without any it does nothing."""

    def __init__(self, job: Job) -> None:
        config = job.recipe.outer
        self._every, self._diloco = config.every, None
        if config.method == "diloco":
            options = config.model_dump(exclude={"method", "workers", "worker"})
            number = worker_of(config).number
            self._diloco = DiLoCo(
                job.sharded, job.optimizer, workers=config.workers, worker=number, **options
            )

    @property
    def steps(self) -> int:
        """Local steps that the workers have taken; 0 without others."""
        return self._diloco.steps if self._diloco else 0

    def step(self) -> Exchanged | None:
        """Exchange what is due; returns what to log at the end of a round."""
        if (diloco := self._diloco) is None:
            return None
        diloco.step()
        if diloco.steps % self._every:
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
