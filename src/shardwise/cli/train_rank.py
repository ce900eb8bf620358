"""One process of ``shardwise train``: as a rank of a launcher, or the only one."""

from __future__ import annotations

import logging
import os
import platform
import sys

import click
import torch

from shardwise.checkpoint.collectives import all_gather_object
from shardwise.cli.other_libraries import import_for, without_their_noise
from shardwise.cli.progress import reporter
from shardwise.cli.tables import table
from shardwise.cli.train_options import TrainOptions
from shardwise.comm.machine.connect import TIMEOUT, connect
from shardwise.comm.machine.devices import device_count
from shardwise.comm.machine.environment import Launch
from shardwise.comm.protocol import Comm
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.launch.error_files import record_errors, told_by_launcher
from shardwise.launch.launcher import EXIT_STOPPED, launch_attempt
from shardwise.launch.signals import save_and_stop_signals
from shardwise.recipe.recipe import Recipe
from shardwise.train.foresight import Foresight
from shardwise.train.loop import train
from shardwise.train.records import Emit, Record
from shardwise.train.requests import SignalRequests
from shardwise.train.start import Attempt

Kill = tuple[int, int] | None
"""The rank of a simulated crash, and its step."""


def run_rank(recipe: Recipe, launch: Launch, options: TrainOptions) -> None:
    """Run as a rank of a launcher: an error is written to the error file that it reads."""
    with told_by_launcher(Exception):
        if options.nproc not in (None, launch.size):
            raise ConfigError(
                f"--nproc is {options.nproc}, but a launcher has already started {launch.size} "
                "processes; leave --nproc out, or start without the launcher."
            )
        run(recipe, launch, options)


def _requests(kill_rank: Kill, rank: int) -> SignalRequests:
    """This rank's requests, with the simulated crash if it is this rank's and the first attempt."""
    if kill_rank is None or launch_attempt(os.environ)[0]:
        return SignalRequests()
    killed, step = kill_rank
    return SignalRequests(kill_at=step if killed == rank else 0)


def run(recipe: Recipe, launch: Launch | None, options: TrainOptions) -> None:
    """This process's rank of the run."""
    attempt = Attempt(*launch_attempt(os.environ))
    requests = _requests(options.kill_rank, launch.rank if launch else 0)
    import_for(recipe)
    with (
        without_their_noise(),
        connect(recipe.run.device, options.timeout or TIMEOUT) as comm,
        save_and_stop_signals(requests.save, requests.stop),  # until then nothing is to be saved
        reporter(recipe.run.log_every, restarted=attempt.number > 0) as report,
        record_errors(),
    ):
        if options.verbose:
            _print_ranks(comm, launch.local_rank if launch else 0)
            if comm.rank == 0:
                logging.getLogger("shardwise").addHandler(logging.StreamHandler())
                logging.getLogger("shardwise").setLevel(logging.INFO)
        elif launch is None and options.nproc is None and (sentence := unused_devices(comm.device)):
            click.echo(sentence)
        output = _Output(report, requests)
        foresight = Foresight(options.force, options.machines)
        outcome = train(recipe, comm, output, requests, attempt, foresight)
        ending = f"{'stopped' if outcome.stopped else 'finished'} at step {outcome.step}"
        if outcome.save_error:
            raise CheckpointError(
                f"the run is {ending}, and the last checkpoint could not be saved: "
                f"{outcome.save_error}"
            )
        if output.error is not None:
            saved = " and saved; rerun the same command to resume" * outcome.stopped
            raise ShardwiseError(
                f"the standard output cannot be written: {output.error.strerror}. The run is "
                f"{ending}{saved}."
            )
    if outcome.stopped:
        sys.exit(EXIT_STOPPED)


def unused_devices(device: torch.device) -> str:
    """A sentence, if one process was started where there are several devices."""
    count = 0 if device.type == "cpu" else device_count()
    return f"devices   1 of {count} is used: --nproc {count} uses all of them" if count > 1 else ""


def _print_ranks(comm: Comm, local_rank: int) -> None:
    """A table of all ranks, printed by rank 0. A collective."""
    row = [str(comm.rank), str(local_rank), str(comm.size), str(comm.device), platform.node()]
    rows = all_gather_object(comm, row, "ranks")
    if comm.rank == 0:
        head = ["rank", "local rank", "world size", "device", "host"]
        click.echo("\n".join([*table(rows, head, left=5), ""]))


class _Output:
    """Prints records; if standard output cannot be written, the run saves and stops.

    Continuing would waste a run that nobody sees, and raising would lose its steps.
    """

    def __init__(self, report: Emit, requests: SignalRequests) -> None:
        self._report, self._requests = report, requests
        self.error: OSError | None = None

    def __call__(self, record: Record) -> None:
        if self.error is None:
            try:
                self._report(record)
            except OSError as error:
                self.error = error
                self._requests.stop()
