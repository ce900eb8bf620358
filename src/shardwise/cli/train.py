"""``shardwise train RECIPE --nproc N``: check the recipe, launch the ranks, or run as one.

Ranks of the CPU are forks of this process, which imports torch once for all. Other ranks have
started when it is imported here, so all import it at the same time.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import click

from shardwise.cli.other_libraries import import_for
from shardwise.cli.train_options import TrainOptions
from shardwise.comm.garbage import uncollected
from shardwise.comm.machine.environment import read_launch
from shardwise.errors import ConfigError
from shardwise.launch.fork import can_fork
from shardwise.launch.launcher import exit_with_launcher, start, threads_of_ranks
from shardwise.recipe.read import parse
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import path_of


def run_train(recipe: Recipe, arguments: Sequence[str], options: TrainOptions) -> None:
    """``shardwise train``; exits with a status of the table in docs/quickstart.md.

    Args:
        recipe: validated.
        arguments: from which it was read: a file, and overrides.
        options: of the launch.
    """
    launch = read_launch(os.environ)
    if launch is not None:  # before torch is imported: a launcher that dies meanwhile is missed
        exit_with_launcher(os.environ)
    else:
        _say_what_an_empty_file_trains(recipe, arguments[0])
    if launch is None and options.nproc is None:
        options = replace(options, nproc=_ranks_of(recipe, arguments[0]))
    restarts = recipe.launch.restarts if options.restarts is None else options.restarts
    _check_kill_rank(options, launch.size if launch else options.nproc or 1, recipe)
    try:
        if launch is None and (options.nproc not in (None, 1) or restarts):
            _launch(recipe, arguments, replace(options, restarts=restarts))
            return
        with uncollected():
            from shardwise.cli import train_rank
        if launch is None:
            train_rank.run(recipe, None, options)
        else:
            train_rank.run_rank(recipe, launch, options)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _say_what_an_empty_file_trains(recipe: Recipe, path: str) -> None:
    """A file without a key may be a mistake, and all of what it trains has its default."""
    if not parse(path_of(path))[0]:
        model = recipe.model.source or f"a new decoder of {recipe.model.layers} layers"
        click.echo(
            f"note      {path} sets no key: this trains {model} on {recipe.data.source}, into "
            f"{recipe.run.folder}"
        )


def _ranks_of(recipe: Recipe, path: str) -> int | None:
    """The ranks that the recipe says this machine has."""
    if recipe.launch.nodes > 1:
        raise ConfigError(
            f"launch.nodes is {recipe.launch.nodes} in this recipe, and no launcher has started "
            f"this process, so it would train alone. Start with: shardwise launch {path}; or say "
            "how many ranks of this machine alone train: --nproc 1"
        )
    return recipe.launch.nproc


def _check_kill_rank(options: TrainOptions, ranks: int, recipe: Recipe) -> None:
    (rank, step), steps = options.kill_rank or (0, 1), recipe.run.steps
    is_known = recipe.run.epochs is None  # how many steps there are
    if rank >= ranks or step < 1 or (is_known and step > steps):
        raise ConfigError(
            f"--kill-rank {rank}@{step} would never happen: ranks are 0 to {ranks - 1}, and "
            f"steps 1 to {steps}. Pass one of each."
        )


def _launch(recipe: Recipe, arguments: Sequence[str], options: TrainOptions) -> None:
    """Launch the ranks; before they meet, check what needs no data, model or processes."""
    ranks = options.nproc or 1
    command = [sys.executable, "-m", "shardwise.cli", "train", *arguments]
    if options.kill_rank:
        command += ["--kill-rank", "{}@{}".format(*options.kill_rank)]
    command += ["--verbose"] * options.verbose + ["--force"] * options.force
    command += [f"--machines={options.machines}"] * (options.machines is not None)
    command += [f"--timeout={options.timeout}"] * (options.timeout is not None)

    def say(fact: str) -> None:
        click.echo(f"crashed   {fact}")

    check = cache(lambda: _is_to_run(recipe, ranks))

    def prepare() -> Callable[[], object] | None:
        if not _imported_once(recipe, ranks, check):
            return None
        return partial(run_train, recipe, arguments, options)

    start(command, ranks, options.restarts or 0, say, check, prepare)


def _imported_once(recipe: Recipe, ranks: int, check: Callable[[], bool]) -> bool:
    """Import for all ranks; ``False`` if they cannot be forks of this process.

    That is so where there may be an accelerator, whose libraries cannot be forked, where another
    thread runs, outside Linux, and in a program that has imported torch: libraries read how many
    threads a rank has when they are imported.
    """
    if recipe.run.device != "cpu" or "torch" in sys.modules or not can_fork():
        return False
    own = dict(os.environ)
    os.environ.update(threads_of_ranks(ranks))
    try:
        with uncollected():
            import_module("shardwise.cli.train_rank")
        if check():
            import_for(recipe)
    finally:
        os.environ.clear()
        os.environ.update(own)
    gc.freeze()  # or looking for garbage would copy the memory that ranks share
    # A fork has what is not written yet, and would write it again; and nothing flushes at its end.
    print(end="", flush=True)
    atexit.register(print, end="", flush=True)
    return can_fork()


def _is_to_run(recipe: Recipe, ranks: int) -> bool:
    """Are steps left to take? If not, print so. Raises ``ConfigError`` if nothing can start."""
    with uncollected():
        from shardwise.cli.format_records import format_record
        from shardwise.train.batches import accumulation
        from shardwise.train.folder import Folder
        from shardwise.train.records import Complete
        from shardwise.train.start import Start, decide_start, finished_steps, holds_run
        from shardwise.train.streams import streams_per_rank

    accumulation(recipe.batch, ranks)
    streams_per_rank(recipe, ranks)
    if not holds_run(recipe):
        return True
    with Folder.locked(recipe.run.folder):
        if decide_start(recipe) is not Start.FINISHED:
            return True
    steps = finished_steps(Path(recipe.run.folder).expanduser()) or recipe.run.steps
    click.echo("\n".join(format_record(Complete(recipe.run.folder, steps))))
    return False
