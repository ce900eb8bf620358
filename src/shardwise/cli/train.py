"""``shardwise train RECIPE --nproc N``: check everything, start the ranks, or be one of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import click

from shardwise.cli.lines import lines
from shardwise.cli.progress import reporter
from shardwise.comm.connect import Launch, connect, launched
from shardwise.errors import CheckpointError, ConfigError
from shardwise.launch.local import STOPPED, attempt, end_with_launcher, start
from shardwise.launch.reasons import leave_reason, reasons_left
from shardwise.launch.signals import listening
from shardwise.train.batches import accumulation
from shardwise.train.config import Recipe
from shardwise.train.desk import take_over
from shardwise.train.loop import train
from shardwise.train.metrics import Complete, Record
from shardwise.train.recipe import keys, read_recipe
from shardwise.train.requests import Requests
from shardwise.train.start import Start, decide

__all__ = ["train_command"]


def _keys() -> str:
    r"""Every key of a recipe with its default, by section; click keeps the lines after ``\b``."""
    sections: dict[str, list[str]] = {}
    for key in keys():
        line = f"  {key.name}: {json.dumps(key.default)}"
        sections.setdefault(key.name.split(".")[0], []).append(f"{line:<36}  {key.sentence}")
    blocks = ("\b\n" + "\n".join(block) for block in sections.values())
    return "\b\nKeys of a recipe, and their defaults:\n\n" + "\n\n".join(blocks)


HELP = """\
Train the language model that RECIPE (YAML or TOML) describes.

Any value of the recipe can be overridden: --optimizer.lr 3e-4 or optimizer.lr=3e-4.

\b
Examples:
  shardwise train recipes/demo.yaml --nproc 2
  shardwise train recipes/demo.yaml --run.steps 50 --sharding.precision bf16
  torchrun --nproc-per-node 2 -m shardwise.cli train recipes/demo.yaml

\b
The run's folder then holds metrics.jsonl, loss.png, the recipe with every default filled in,
checkpoints, and the model as safetensors with the tokenizer, which transformers loads as it is.

\b
A run that was stopped or killed goes on when the same command is given again, on any number of
ranks. While it runs:
  kill -USR1 PID, or touch RUN/save             save, and go on
  Ctrl-C, kill PID, or touch RUN/stop           save, and end with status 75
  Ctrl-C again                                  end at once
"""


@dataclass(frozen=True)
class Processes:
    """How many, how often anew, and what goes wrong on purpose."""

    nproc: int | None
    restarts: int
    kill_rank: tuple[int, int] | None


def _rank_and_step(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    if text is None:
        return None
    rank, at, step = text.partition("@")
    if not (at and rank.isdecimal() and step.isdecimal()):
        raise click.BadParameter(f"{text!r} is not RANK@STEP, such as 1@80.")
    return int(rank), int(step)


@click.command(
    "train",
    help=HELP,
    epilog=_keys(),
    short_help="Train a language model, sharded.",
    context_settings={"ignore_unknown_options": True, "max_content_width": 100},
)
@click.argument("recipe", type=click.Path())
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes to start on this machine, one per rank.  [default: 1]",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start all ranks again after one of them died.",
)
@click.option(
    "--kill-rank",
    callback=_rank_and_step,
    metavar="RANK@STEP",
    help="Rehearse a crash: this rank kills itself at this step, once.",
)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
def train_command(recipe: str, overrides: tuple[str, ...], **processes: Any) -> None:
    """The command; ``HELP`` is what people read."""
    wanted, launch = Processes(**processes), launched(os.environ)
    try:
        if launch is not None:
            _be_a_rank(recipe, overrides, wanted, launch)
        elif wanted.nproc in (None, 1) and not wanted.restarts:
            _run(read_recipe(recipe, overrides), _requests(wanted, rank=0))
        else:
            _start(recipe, overrides, wanted)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _start(path: str, overrides: tuple[str, ...], wanted: Processes) -> None:
    """Check what can be known to fail without data, model or processes; then start the ranks."""
    recipe, ranks = read_recipe(path, overrides), wanted.nproc or 1
    accumulation(recipe.batch, ranks)
    if decide(recipe) is Start.FINISHED:
        _say(Complete(recipe.run.folder, recipe.run.steps))
        return
    command = [sys.executable, "-m", "shardwise.cli", "train", path, *overrides]
    if recipe.run.overwrite:  # once: ranks that are started again go on with what they find
        take_over(recipe)
        command += ["--run.overwrite", "false"]
    if wanted.kill_rank:
        command += ["--kill-rank", "{}@{}".format(*wanted.kill_rank)]
    start(command, ranks, wanted.restarts, lambda fact: click.echo(f"crashed   {fact}"))


def _say(record: Record) -> None:
    for line in lines(record):
        click.echo(line)


def _be_a_rank(path: str, overrides: tuple[str, ...], wanted: Processes, launch: Launch) -> None:
    """Inside a launcher: leave the reason of a failure where it will look for it."""
    end_with_launcher(os.environ)
    try:
        if wanted.nproc not in (None, launch.size):
            raise ConfigError(
                f"--nproc is {wanted.nproc}, but a launcher has started {launch.size} processes "
                "already; leave --nproc out, or start without the launcher."
            )
        if attempt(os.environ):
            overrides = (*overrides, "--run.overwrite", "false")
        _run(read_recipe(path, overrides), _requests(wanted, launch.rank))
    except Exception as error:
        if leave_reason(error):
            sys.exit(1)
        raise


def _requests(wanted: Processes, rank: int) -> Requests:
    """What this rank is asked for, and the crash that it rehearses, if that is still to come."""
    dies = wanted.kill_rank and wanted.kill_rank[0] == rank and not attempt(os.environ)
    return Requests(kill_at=wanted.kill_rank[1] if wanted.kill_rank and dies else 0)


def _run(recipe: Recipe, requests: Requests) -> None:
    """This process's rank of the run."""
    with (
        warnings.catch_warnings(),
        listening(requests.save, requests.stop),
        connect(recipe.run.device) as comm,
        reporter(recipe.run.log_every, again=attempt(os.environ) > 0) as report,
        reasons_left(),
    ):
        # Of a module hook that a peer's death interrupts; the rank's own reason says more.
        warnings.filterwarnings("ignore", "module forward hook with ``always_call=True``")
        outcome = train(recipe, comm, report, requests)
        if outcome.trouble:
            raise CheckpointError(
                f"the run is {'stopped' if outcome.stopped else 'finished'} at step "
                f"{outcome.step}, and the last checkpoint could not be saved: {outcome.trouble}"
            )
    if outcome.stopped:
        sys.exit(STOPPED)
