"""The training loop: prepare, resume, train, validate, save. Emits records, prints nothing.

    1. folder and data        rank 0 reads and broadcasts
    2. sharded model          with its checkpoint, if the run is resumed
    3. take over the folder   nothing on the disk has changed before
    4. steps                  with validation and checkpoints
    5. results                the model, the loss curve, a sample, the table of bytes

A step whose loss has been emitted is complete on every rank. Saving, and stopping on request,
happen between two steps only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.collectives import all_gather_object
from shardwise.comm.machine.accelerators import check_kernels
from shardwise.comm.protocol import Comm
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.recipe.read import flatten
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import accumulation
from shardwise.train.built import built_record
from shardwise.train.checkpoints import Checkpoints, RunState, is_due
from shardwise.train.collectives import all_gather_floats
from shardwise.train.data import Data, prepare
from shardwise.train.disk_estimate import check_disk
from shardwise.train.footprint import footprint
from shardwise.train.foresight import USUAL, Foresight, RunPlan, compared, planned
from shardwise.train.job import Job, build
from shardwise.train.length import in_steps, is_multiple, notes, times_due
from shardwise.train.memory_estimate import check_memory
from shardwise.train.model_folder import with_tokenizer
from shardwise.train.outer import Outer, check_outer
from shardwise.train.packing_check import check_packing
from shardwise.train.recorded_step import recorded
from shardwise.train.records import (
    Complete,
    Emit,
    Evaluated,
    Finished,
    Placed,
    Stepped,
    Stopped,
    Warned,
)
from shardwise.train.requests import Request, SignalRequests, combined
from shardwise.train.results import export, files_of
from shardwise.train.run_logger import RunLogger
from shardwise.train.slow_ranks import SlowRanks, seconds_waited
from shardwise.train.start import FIRST_ATTEMPT, Attempt, Start, finished_steps
from shardwise.train.streams import StreamedRows, streams_per_rank
from shardwise.train.throughput import WINDOW, Throughput, memory_in_use
from shardwise.train.trackers import check_installed
from shardwise.train.validation import Validation
from shardwise.train.worker import worker_of

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The end of a run; the same on every rank, except for seconds.

    Attributes:
        step: steps taken, earlier attempts included.
        stopped: the run stopped on request and can be resumed.
        evaluated: the last validation of this attempt, if any.
        save_error: why the last checkpoint could not be saved, or ``""``.
    """

    step: int
    stopped: bool = False
    evaluated: Evaluated | None = None
    save_error: str = ""


def train(
    recipe: Recipe,
    comm: Comm,
    emit: Emit,
    requests: SignalRequests | None = None,
    attempt: Attempt = FIRST_ATTEMPT,
    foresight: Foresight = USUAL,
) -> Outcome:
    """Train by ``recipe`` on the ranks of ``comm``. A collective.

    Args:
        recipe: the same on every rank, which is checked.
        comm: the ranks.
        emit, requests: called on rank 0 with each record; requests of signals to this process.
        attempt, foresight: the launcher's attempt, and how the run is planned.

    Raises:
        ConfigError: batch, folder, data or memory do not fit, or the folder holds a different run.
        CheckpointError: the checkpoint to resume from is damaged.
        RanksDisagree: the ranks were given different recipes.
        ShardwiseError: the loss is not finite.
    """
    check_installed(recipe.logging)
    check_kernels(comm.device, recipe.optimizer.name.removeprefix("paged_"))
    accumulation(recipe.batch, comm.size)  # before anything is read or written
    streams_per_rank(recipe, comm.size)
    check_outer(recipe)
    # By key, so that a difference between ranks is named.
    comm.agree({name: str(value) for name, value in flatten(recipe.model_dump()).items()})
    with RunLogger.open_run(recipe, comm, emit, attempt) as (logger, start):
        if start is Start.FINISHED:
            steps = finished_steps(Path(recipe.run.folder).expanduser()) or recipe.run.steps
            logger.log(Complete(recipe.run.folder, steps))
            return Outcome(steps)
        predicted = check_memory(recipe, comm.device, comm.size)
        if recipe.model.source is not None:
            logger.log(predicted)
        with logger.busy("looking for the model's files"):
            recipe = with_tokenizer(recipe)  # fetches a model of the hub
        _seed(recipe.run.seed + comm.rank)
        data = prepare(recipe, comm, logger.folder, logger.busy)
        logger.log(data.report)
        if not isinstance(data.training, StreamedRows):
            recipe = in_steps(recipe, len(data.training) // worker_of(recipe.outer).workers)
        if recipe.model.source is None:
            check_memory(recipe, comm.device, comm.size, data.tokenizer.get_vocab_size())
        with logger.busy("building the model"):
            job = build(recipe, comm, data.training, data.tokenizer.get_vocab_size())
            if recipe.data.format != "text" and recipe.data.packing is True:
                check_packing(job.model, data.tokenizer.get_vocab_size(), comm.device)
        plan = _report_built(job, data, logger, foresight)
        with closing(job.ahead):
            run = _Loop(job, data, logger, (requests or SignalRequests(), plan))
            outcome = run.run(start)
        if not outcome.stopped:
            with job.averaged():
                export(job, data, logger, run.tokens_per_second, outcome.save_error)
            logger.log(run.placement)
            logger.log(Finished(recipe.run.folder, files_of(logger), logger.elapsed, outcome.step))
        return outcome


def _seed(seed: int) -> None:
    """Seed the global generators, so that equal runs draw equal numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what libraries draw from
    torch.manual_seed(seed)


def _report_built(job: Job, data: Data, logger: RunLogger, foresight: Foresight) -> RunPlan | None:
    """Say what was built; return its plan, if the recipe asks for one."""
    logger.log(built_record(job, data))
    if logger.folder is not None:
        check_disk(job, logger.folder.checkpoints)
    for note in notes(job.recipe):
        logger.log(Warned(note))
    return planned(job, data, logger, foresight) if job.recipe.run.plan else None


# --- the steps -------------------------------------------------------------------------------


class _Loop:
    """The remaining steps of a run."""

    def __init__(
        self, job: Job, data: Data, logger: RunLogger, asked: tuple[SignalRequests, RunPlan | None]
    ) -> None:
        self._job, self._logger = job, logger
        self._requests, self._plan = asked
        self._recording: Mapping[str, Any] = {}  # of one step
        self._comm, self._config = job.sharded.comm, job.recipe.run
        self._files = data.files
        self._checkpoints = Checkpoints(job, data, logger.log)
        rows, micro = self._config.eval_rows, job.recipe.batch.micro
        self._validation = Validation(data.validation, rows, micro, job.head)
        self._throughput = Throughput(self._config.throughput_warmup)
        self._slow_ranks = SlowRanks(partial(seconds_waited, job.sharded))
        self._state = RunState()
        self._evaluated: Evaluated | None = None
        self._steps = self._config.steps  # fewer if the text ends, or validations do not improve
        self.placement: Placed | None = None

    def resume(self, start: Start) -> None:
        """Load the checkpoint to resume from, if any; then take over the folder.

        Raises:
            ConfigError: the text is not enough for one step.
        """
        with self._logger.busy("reading the checkpoint"):
            start, self._state = self._checkpoints.resume(start)
        self._job.batches.start(self._state.streams)
        ended = all_gather_floats(self._comm, [self._job.ahead.ended()], "end of text").any()
        if ended or self._is_stale():
            self._steps = self._state.step
        if self._steps == 0:
            raise ConfigError(
                f"data.source {self._job.recipe.data.source} has less text than one step takes: "
                f"{self._job.recipe.batch.rows} rows of {self._job.recipe.data.context} tokens, as "
                "many from each stream. Give it more, or lower batch.rows or data.context."
            )
        self._logger.start_run(start, self._state.step, self._files)

    def run(self, start: Start) -> Outcome:
        """Resume, meet other workers if there are any, and train from where they are."""
        self.resume(start)
        alone = self._job.recipe.outer.method == "none"
        with nullcontext() if alone else self._logger.busy("waiting for other workers"):
            self._outer = Outer(self._job, self._is_to_stop)
        with closing(self._outer):
            if self._outer.has_left:
                return self._stopped(saved=self._state.step > 0)
            self._state = replace(self._state, step=max(self._state.step, self._outer.steps))
            return self.run_steps()

    def _is_to_stop(self) -> bool:
        return self._requests.stops or self._logger.requested() is Request.STOP

    def run_steps(self) -> Outcome:
        """Run the remaining steps, or until the run is requested to stop."""
        config = self._job.recipe.checkpoint
        if not self._state.validated and self._evaluate() and config.keep_best:
            self._save()  # again: the run stopped before this validation, which is the best
        while (step := self._state.step + 1) <= self._steps:
            request, step = self._step(step), self._state.step
            is_stopping = request is Request.STOP and step < self._steps
            best = not is_stopping and self._is_validation_due(step) and self._evaluate()
            saved = self._save() if request or is_due(config, step, self._steps, best) else False
            self._checkpoints.poll()
            if is_stopping:
                self._checkpoints.wait()
                return self._stopped(saved and not self._checkpoints.save_error)
            self._logger.clear_requests()
        self._checkpoints.wait()
        self._compare()  # of a run that ended early
        if self._steps < self._config.steps:
            self._logger.log(Warned(self._ended_message()))
        return Outcome(self._state.step, False, self._evaluated, self._checkpoints.save_error)

    def _ended_message(self) -> str:
        if self._is_stale():
            return (
                f"the lowest validation loss, {self._state.best:.4f}, is {self._state.stale} "
                f"validation{'s' * (self._state.stale != 1)} ago (run.patience), so the run ends "
                f"at step {self._steps} of {self._config.steps}."
            )
        epochs = self._job.recipe.data.streaming.epochs
        return (
            f"the text ended after step {self._steps} of {self._config.steps}: a stream has too "
            f"few rows for one more step, and data.streaming.epochs is {epochs}."
        )

    def _step(self, step: int) -> Request:
        """Run and log one step; returns the strongest request of any rank."""
        job = self._job
        self._slow_ranks.begin()
        is_first = not self._throughput.steps
        busy = self._logger.busy("taking the first step") if is_first else nullcontext()
        with self._recorded(step), busy, self._throughput.step():
            own_loss = job.forward_backward(step - 1)
            own_norm, lr = self._retry_failed_save(lambda: job.clip_and_set_lr(step - 1))
            scale = job.scaler.get_scale() if job.scaler.is_enabled() else None
            self._retry_failed_save(job.update)
            exchanged = self._slow_ranks.without(self._outer.step)
            # The one wait for the device, when all of the step is issued.
            share, norm = torch.stack([own_loss, own_norm]).tolist()
        request = max(self._requests.take(step), self._logger.requested())
        memory_now, waited = memory_in_use(self._comm.device), self._slow_ranks.last
        values = (share, memory_now, request, job.ahead.ended(), waited, job.ahead.tokens)
        per_rank = all_gather_floats(self._comm, values, "loss")
        self._throughput.count(int(per_rank[:, 5].sum()))
        if slow := self._slow_ranks.end(per_rank[:, 4].tolist()):
            self._logger.log(Warned(slow))
        self._steps = step if per_rank[:, 3].any() else self._steps
        # The only moment after the last update with gradients; with patience any may be the last.
        if step == self._steps or (self._config.patience and self._is_validation_due(step)):
            self.placement = footprint(job.sharded, job.optimizer, self._comm)
        job.optimizer.zero_grad()
        record = self._step_record(step, (norm, lr, scale), per_rank)
        self._logger.log(record)
        self._logger.log(exchanged)
        self._compare(last=step == self._steps)
        _check_finite(record)
        validated, taken = not self._is_validation_due(step), max(step, self._outer.steps)
        self._state = replace(self._state, step=taken, validated=validated, seen=record.tokens)
        return combined(per_rank[:, 2].tolist())

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Record the last step that tokens/s leaves out, and not the first, on rank 0."""
        if self._throughput.steps + 1 != max(2, self._config.throughput_warmup):
            yield
            return
        with recorded(self._job, step, self._logger, self._plan) as self._recording:
            yield

    def _compare(self, last: bool = True) -> None:
        """Say once what steps take beside the plan, when they are as many as are averaged."""
        taken, enough = self._throughput.steps, self._config.throughput_warmup + WINDOW
        if self._plan is not None and taken and (last or taken == enough):
            rate = self._throughput.tokens_per_second
            self._logger.log(compared(self._plan, self._recording or None, rate))
            self._plan = None

    def _retry_failed_save(self, action: Callable[[], T]) -> T:
        """Call ``action``; again if it first raised the failure of a save in the background."""
        try:
            return action()
        except CheckpointError as error:
            self._checkpoints.report_failure(error)
            return action()  # the failed call changed nothing

    def _step_record(
        self, step: int, values: tuple[float, float, float | None], per_rank: Tensor
    ) -> Stepped:
        steps, throughput = self._steps, self._throughput
        config, save_every = self._config, self._job.recipe.checkpoint.save_every
        between = {
            "validation": times_due(step, steps, config.eval_every, config.eval_delay),
            "saving": times_due(step, steps, save_every) if save_every else 0,
        }
        return Stepped(
            step=step,
            steps=steps,
            loss=per_rank[:, 0].sum().item(),
            grad_norm=values[0],
            lr=values[1],
            tokens_per_second=throughput.tokens_per_second,
            memory=int(per_rank[:, 1].max()),
            seconds_left=throughput.seconds_left(steps - step, between),
            loss_scale=values[2],
            tokens=self._state.seen + int(per_rank[:, 5].sum()),
        )

    def _evaluate(self) -> bool:
        """Validate; returns whether the loss is the lowest so far."""
        state = self._state
        self._outer.finish()  # what is validated is what is saved
        with self._throughput.between_steps("validation"), self._job.averaged():
            evaluated = self._validation.evaluate(self._job.model, self._comm, state.step)
        self._evaluated = evaluated
        self._logger.log(evaluated)
        best = state.best is None or evaluated.loss < state.best
        lowest, stale = (evaluated.loss, 0) if best else (state.best, state.stale + 1)
        self._state = replace(state, validated=True, best=lowest, stale=stale)
        if self._is_stale():
            self._steps = self._state.step
        return best

    def _is_stale(self) -> bool:
        """Were the last ``run.patience`` validations no better? The same on every rank."""
        return self._state.stale >= (self._config.patience or math.inf)

    def _is_validation_due(self, step: int) -> bool:
        is_due = is_multiple(step, self._config.eval_every) and step >= self._config.eval_delay
        return step == self._steps or is_due

    def _save(self) -> bool:
        self._logger.sync()
        positions = self._job.ahead.positions()
        of_ranks = all_gather_object(self._comm, positions, "positions in the text")
        self._state = replace(self._state, streams=[one for streams in of_ranks for one in streams])
        evaluated = self._evaluated
        is_current = evaluated is not None and evaluated.step == self._state.step
        metric = evaluated.loss if evaluated and is_current else None
        with self._throughput.between_steps("saving"):
            self._outer.finish()
            return self._checkpoints.save(self._state, metric)

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s over all ranks and all steps of this attempt, but the first ones."""
        return self._throughput.overall

    def _stopped(self, saved: bool) -> Outcome:
        self._compare()
        self._logger.log(Stopped(self._state.step, self._steps, saved))
        self._logger.clear_requests()
        return Outcome(self._state.step, True, self._evaluated, self._checkpoints.save_error)


def _check_finite(record: Stepped) -> None:
    if not (math.isfinite(record.loss) and (math.isfinite(record.grad_norm) or record.skipped)):
        advice = f"lower optimizer.lr, which was {record.lr:g}, or raise optimizer.warmup"
        if record.step == 1:  # no update came before it
            advice = "nor were those that it began with, in sharding.precision"
        raise ShardwiseError(
            f"step {record.step}: the loss is {record.loss:g} and the gradient norm "
            f"{record.grad_norm:g}, so the parameters are not finite and the run ends; {advice}."
        )
