"""The main job: prepare, go on or begin, train, validate, save. Emits records, prints nothing.

    1. the folder and the data        rank 0 reads, everybody receives
    2. the model, sharded; what was saved of it, if the run goes on
    3. the folder is taken            until here nothing on the disk has changed
    4. the steps                      validation and checkpoints every now and then
    5. what remains                   a sample, the table of bytes, the model, the picture

A step of which the loss was told is whole, on every rank; only between two steps is anything
saved, and only there does a run stop because it was asked to.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from shardwise.comm.protocol import Comm
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.train.batches import accumulation
from shardwise.train.checkpoints import Checkpoints, Point, is_due
from shardwise.train.config import Recipe, RunConfig
from shardwise.train.data import Data, prepare
from shardwise.train.desk import Desk
from shardwise.train.estimate import check_memory
from shardwise.train.exchange import gathered
from shardwise.train.export import WEIGHTS, companions
from shardwise.train.folder import Folder
from shardwise.train.footprint import footprint
from shardwise.train.job import Job, build
from shardwise.train.meter import Meter, memory_in_use
from shardwise.train.metrics import (
    Built,
    Complete,
    Emit,
    Evaluated,
    Finished,
    Placed,
    Sampled,
    Stepped,
    Stopped,
    Warned,
)
from shardwise.train.plot import draw
from shardwise.train.recipe import flat
from shardwise.train.requests import Ask, Requests, agreed
from shardwise.train.sample import sample
from shardwise.train.start import FIRST, Attempt, Start
from shardwise.train.validation import Validation

__all__ = ["Outcome", "train"]

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a run ended; but for seconds, the same on every rank.

    Attributes:
        step: steps taken, over all times that it was started.
        stopped: it was asked to, and can go on.
        evaluated: the last validation since it was started, if there was one.
        trouble: why its last checkpoint could not be saved, or ``""``.
    """

    step: int
    stopped: bool = False
    evaluated: Evaluated | None = None
    trouble: str = ""


def train(
    recipe: Recipe,
    comm: Comm,
    emit: Emit,
    requests: Requests | None = None,
    attempt: Attempt = FIRST,
) -> Outcome:
    """Train as ``recipe`` says, on the ranks of ``comm``. A collective.

    Args:
        recipe: alike on every rank, which is checked.
        comm: the ranks.
        emit: called on rank 0 with each record as it happens.
        requests: what this process is asked for while it trains.
        attempt: which time a launcher starts these ranks.

    Raises:
        ConfigError: the recipe cannot work here (batch, folder, data), or is not that of the run
            that it would go on with.
        CheckpointError: what it would go on from is broken.
        RanksDisagree: the ranks were given different recipes.
        ShardwiseError: the loss is no longer a number.
    """
    start = time.perf_counter()
    accumulation(recipe.batch, comm.size)  # before anything is read or written
    facts = flat(recipe.model_dump())  # every key, so that a difference between ranks is named
    comm.agree({name: str(value) for name, value in facts.items()})
    with Desk.opened(recipe, comm, emit, attempt) as (desk, beginning):
        if beginning is Start.FINISHED:
            desk.say(Complete(recipe.run.folder, recipe.run.steps))
            return Outcome(recipe.run.steps)
        check_memory(recipe, comm.device, comm.size)
        _seed(recipe.run.seed + comm.rank)
        data = prepare(recipe, comm, desk.folder, desk.busy)
        desk.say(data.report)
        check_memory(recipe, comm.device, comm.size, data.tokenizer.get_vocab_size())
        with desk.busy("building the model"):
            job = build(recipe, comm, data.training, data.tokenizer.get_vocab_size())
        desk.say(_built(job, data))
        run = _Run(job, data, desk, requests or Requests())
        run.begin(beginning)
        outcome = run.walk()
        if not outcome.stopped:
            _finish(job, data, desk, outcome.trouble)
            desk.say(run.placed)
            seconds = time.perf_counter() - start
            desk.say(Finished(recipe.run.folder, _files(desk), seconds, outcome.step))
        return outcome


def _seed(seed: int) -> None:
    """Whatever draws numbers without a generator of its own draws the same in an equal run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what libraries draw from
    torch.manual_seed(seed)


def _built(job: Job, data: Data) -> Built:
    recipe, ranks = job.recipe, job.sharded.comm.size
    return Built(
        parameters=sum(bucket.layout.used for bucket in job.sharded.buckets),
        strategy=job.sharded.placement.name,
        ranks=ranks,
        rows=recipe.batch.rows,
        micro=recipe.batch.micro,
        accumulation=accumulation(recipe.batch, ranks),
        context=recipe.data.context,
        steps=recipe.run.steps,
        epochs=recipe.run.steps * recipe.batch.rows / len(data.training),
    )


# --- the steps -------------------------------------------------------------------------------


class _Run:
    """The steps of a run, from where it stands."""

    def __init__(self, job: Job, data: Data, desk: Desk, requests: Requests) -> None:
        self._job, self._desk, self._requests = job, desk, requests
        self._comm, self._config = job.sharded.comm, job.recipe.run
        self._files = data.files
        self._checkpoints = Checkpoints(job, data, desk.say)
        rows, micro = self._config.eval_rows, job.recipe.batch.micro
        self._validation = Validation(data.validation, rows, micro)
        self._meter = Meter()
        self._point = Point()
        self._evaluated: Evaluated | None = None
        self.placed: Placed | None = None

    def begin(self, start: Start) -> None:
        """Load what the run goes on from; with that the start is proven, and the folder taken."""
        start, self._point = self._checkpoints.resume(start)
        self._desk.begin(start, self._point.step, self._files)

    def walk(self) -> Outcome:
        """All steps that are left, or until it is asked to stop."""
        job = self._job
        if not self._point.validated and self._evaluates() and job.recipe.checkpoint.keep_best:
            self._save()  # again: it was stopped before this validation, which is the best so far
        steps = self._config.steps
        for step in range(self._point.step + 1, steps + 1):
            ask = self._step(step)
            stops = ask is Ask.STOP and step < steps
            best = not stops and _validates(self._config, step) and self._evaluates()
            saved = self._save() if ask or self._is_due(best) else False
            self._checkpoints.look()
            if stops:
                self._checkpoints.settle()
                saved = saved and not self._checkpoints.trouble
                self._desk.say(Stopped(step, steps, saved))
            self._desk.done()
            if stops:
                return self._outcome(stopped=True)
        self._checkpoints.settle()
        return self._outcome(stopped=False)

    def _step(self, step: int) -> Ask:
        """One step, told; what all ranks were asked for meanwhile."""
        job = self._job
        with self._meter.step(job.tokens_per_step):
            share = job.gradients(step - 1)
            norm, lr = self._whatever_is_lost(lambda: job.tamed(step - 1))
            self._whatever_is_lost(job.optimizer.step)
        if step == self._config.steps:  # the only moment after the last update with gradients
            self.placed = footprint(job.sharded, job.optimizer, self._comm)
        job.optimizer.zero_grad()
        asked = max(self._requests.take(step), self._desk.asked())
        mine = (share, memory_in_use(self._comm.device), asked)
        heard = gathered(self._comm, mine, "loss")
        loss, memory = heard[:, 0].sum().item(), heard[:, 1].max().item()
        record = self._stepped(step, (loss, norm, lr), int(memory))
        self._desk.say(record)
        _check_finite(record)
        self._point = replace(self._point, step=step, validated=not _validates(self._config, step))
        return agreed(heard[:, 2].tolist())

    def _whatever_is_lost(self, act: Callable[[], T]) -> T:
        """``act``, where the engine may first say that a save in the background has failed."""
        try:
            return act()
        except CheckpointError as error:
            self._checkpoints.lost(error)
            return act()  # nothing had changed

    def _stepped(self, step: int, told: tuple[float, float, float], memory: int) -> Stepped:
        steps, meter = self._config.steps, self._meter
        return Stepped(
            step=step,
            steps=steps,
            loss=told[0],
            grad_norm=told[1],
            lr=told[2],
            tokens_per_second=meter.tokens_per_second,
            memory=memory,
            seconds_left=meter.seconds_left(steps - step),
        )

    def _evaluates(self) -> bool:
        """Validate; is it the best so far?"""
        point = self._point
        found = self._validation.measure(self._job.model, self._comm, point.step)
        self._evaluated = found
        self._desk.say(found)
        best = point.best is None or found.loss < point.best
        self._point = replace(point, validated=True, best=found.loss if best else point.best)
        return best

    def _is_due(self, best: bool) -> bool:
        config = self._job.recipe.checkpoint
        return is_due(config, self._point.step, self._config.steps, best)

    def _save(self) -> bool:
        self._desk.sync()
        found = self._evaluated
        here = found is not None and found.step == self._point.step
        return self._checkpoints.save(self._point, found.loss if found and here else None)

    def _outcome(self, stopped: bool) -> Outcome:
        return Outcome(self._point.step, stopped, self._evaluated, self._checkpoints.trouble)


def _validates(config: RunConfig, step: int) -> bool:
    """Is a validation due after step ``step``? Pure."""
    return step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)


def _check_finite(record: Stepped) -> None:
    if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
        raise ShardwiseError(
            f"step {record.step}: the loss is {record.loss:g} and the gradient norm "
            f"{record.grad_norm:g}, so the parameters are ruined and the run ends here. The "
            f"learning rate was {record.lr:g}; lower optimizer.lr, or raise optimizer.warmup."
        )


# --- what remains ----------------------------------------------------------------------------


def _finish(job: Job, data: Data, desk: Desk, trouble: str) -> None:
    """A sample and the whole model: collectives. Rank 0 writes."""
    recipe, comm = job.recipe, job.sharded.comm
    if recipe.sample.tokens:
        text = sample(job.model, data.tokenizer, recipe.sample, recipe.run.seed, comm.device)
        desk.say(Sampled(recipe.sample.prompt, text))
    try:
        job.sharded.save_file(Path(recipe.run.folder).expanduser() / WEIGHTS)
        if desk.folder is not None:
            for name, text in companions(job, data).items():
                desk.folder.write_text(name, text)
    except (OSError, CheckpointError) as error:
        raise _not_written(error, recipe.run.steps, trouble) from error
    if desk.folder is not None:
        _draw(desk, desk.folder, recipe.sharding.strategy, comm.size)


def _not_written(error: Exception, steps: int, trouble: str) -> CheckpointError:
    why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    checkpoint = f" Its last checkpoint could not be saved either: {trouble}" if trouble else ""
    return CheckpointError(
        f"the run has taken all its {steps:,} steps, and the model could not be written: {why}"
        f"{checkpoint} Rerun the same command when there is room: it goes on from the last "
        "checkpoint that was saved."
    )


def _files(desk: Desk) -> tuple[str, ...]:
    if desk.folder is None:
        return ()
    files = (path.name for path in desk.folder.path.iterdir() if path.is_file())
    return tuple(sorted(name for name in files if not name.startswith(".")))


def _draw(desk: Desk, folder: Folder, strategy: str, ranks: int) -> None:
    title = f"{folder.path.name}: {strategy} over {ranks} rank{'s' * (ranks != 1)}"
    try:
        with folder.replacing("loss.png") as path:
            draw(desk.journal.records, title, path)
    except ImportError:
        desk.say(Warned("loss.png is not drawn: pip install 'shardwise[train]' for matplotlib."))
