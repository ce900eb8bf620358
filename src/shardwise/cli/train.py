"""``shardwise train RECIPE --nproc N``: check everything, start the ranks, or be one of them."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import click

from shardwise.cli.lines import lines
from shardwise.cli.progress import reporter
from shardwise.comm.connect import connect
from shardwise.comm.environment import Launch, launched
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.launch.local import STOPPED, attempt, end_with_launcher, start
from shardwise.launch.reasons import leave_reason, reasons_left
from shardwise.launch.signals import listening
from shardwise.train.batches import accumulation
from shardwise.train.config import Recipe
from shardwise.train.loop import train
from shardwise.train.metrics import Complete, Emit, Record
from shardwise.train.requests import Requests
from shardwise.train.start import Attempt, Start, decide

__all__ = ["Processes", "run_train"]


@dataclass(frozen=True)
class Processes:
    """How many, how often anew, and what goes wrong on purpose."""

    nproc: int | None
    restarts: int
    kill_rank: tuple[int, int] | None


def run_train(recipe: Recipe, arguments: Sequence[str], wanted: Processes) -> None:
    """``shardwise train``; ends the process with the status that the documents list.

    Args:
        recipe: checked as a whole.
        arguments: that it was read from: a file, and overrides.
        wanted: how it runs.
    """
    launch = launched(os.environ)
    _check_crash(wanted, launch.size if launch else wanted.nproc or 1, recipe.run.steps)
    try:
        if launch is not None:
            _be_a_rank(recipe, wanted, launch)
        elif wanted.nproc in (None, 1) and not wanted.restarts:
            _run(recipe, _requests(wanted, rank=0))
        else:
            _start(recipe, arguments, wanted)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _check_crash(wanted: Processes, ranks: int, steps: int) -> None:
    rank, step = wanted.kill_rank or (0, 1)
    if rank >= ranks or not 1 <= step <= steps:
        raise ConfigError(
            f"--kill-rank {rank}@{step} would never happen: ranks are 0 to {ranks - 1} here, and "
            f"steps 1 to {steps}. Name one of each."
        )


def _start(recipe: Recipe, arguments: Sequence[str], wanted: Processes) -> None:
    """Check what can be known to fail without data, model or processes; then start the ranks."""
    ranks = wanted.nproc or 1
    accumulation(recipe.batch, ranks)
    if decide(recipe) is Start.FINISHED:
        _say(Complete(recipe.run.folder, recipe.run.steps))
        return
    command = [sys.executable, "-m", "shardwise.cli", "train", *arguments]
    if wanted.kill_rank:
        command += ["--kill-rank", "{}@{}".format(*wanted.kill_rank)]
    start(command, ranks, wanted.restarts, lambda fact: click.echo(f"crashed   {fact}"))


def _say(record: Record) -> None:
    for line in lines(record):
        click.echo(line)


def _be_a_rank(recipe: Recipe, wanted: Processes, launch: Launch) -> None:
    """Inside a launcher: leave the reason of a failure where it will look for it."""
    end_with_launcher(os.environ)
    try:
        if wanted.nproc not in (None, launch.size):
            raise ConfigError(
                f"--nproc is {wanted.nproc}, but a launcher has started the processes already, of "
                f"which there are {launch.size}; leave --nproc out, or start without the launcher."
            )
        _run(recipe, _requests(wanted, launch.rank))
    except Exception as error:
        if leave_reason(error):
            sys.exit(1)
        raise


def _requests(wanted: Processes, rank: int) -> Requests:
    """What this rank is asked for, and the crash that it rehearses, if that is still to come."""
    dies = wanted.kill_rank and wanted.kill_rank[0] == rank and not attempt(os.environ)[0]
    return Requests(kill_at=wanted.kill_rank[1] if wanted.kill_rank and dies else 0)


def _run(recipe: Recipe, requests: Requests) -> None:
    """This process's rank of the run."""
    time = Attempt(*attempt(os.environ))
    with (
        warnings.catch_warnings(),
        listening(requests.save, requests.stop),
        connect(recipe.run.device) as comm,
        reporter(recipe.run.log_every, again=time.number > 0) as report,
        reasons_left(),
    ):
        # Of a module hook that a peer's death interrupts; the rank's own reason says more.
        warnings.filterwarnings("ignore", "module forward hook with ``always_call=True``")
        output = _Output(report, requests)
        outcome = train(recipe, comm, output, requests, time)
        how = f"{'stopped' if outcome.stopped else 'finished'} at step {outcome.step}"
        if outcome.trouble:
            raise CheckpointError(
                f"the run is {how}, and the last checkpoint could not be saved: {outcome.trouble}"
            )
        if output.error is not None:
            then = " and saved; rerun the same command to resume" * outcome.stopped
            raise ShardwiseError(
                f"the standard output cannot be written: {output.error.strerror}. The run is "
                f"{how}{then}."
            )
    if outcome.stopped:
        sys.exit(STOPPED)


class _Output:
    """Tells the user, as long as that can be told; where it cannot, the run saves and stops.

    A run that went on would be seen by nobody, and one that ended of it would lose its steps.
    """

    def __init__(self, report: Emit, requests: Requests) -> None:
        self._report, self._requests = report, requests
        self.error: OSError | None = None

    def __call__(self, record: Record) -> None:
        if self.error is None:
            try:
                self._report(record)
            except OSError as error:
                self.error = error
                self._requests.stop()
