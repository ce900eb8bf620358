"""``shardwise train RECIPE --nproc N``: check everything, start the ranks, or be one of them."""

from __future__ import annotations

import json
import os
import sys

import click

from shardwise.cli.progress import reporter
from shardwise.comm.connect import connect, launched
from shardwise.errors import ConfigError
from shardwise.launch.elastic import leave_reason, reasons_left, start
from shardwise.train.batches import accumulation
from shardwise.train.config import Recipe
from shardwise.train.folder import check
from shardwise.train.loop import train
from shardwise.train.recipe import keys, read_recipe

__all__ = ["train_command"]


def _keys() -> str:
    r"""Every key of a recipe with its default, by section; click keeps the lines after ``\b``."""
    sections: dict[str, list[str]] = {}
    for key in keys():
        line = f"  {key.name}: {json.dumps(key.default)}"
        sections.setdefault(key.name.split(".")[0], []).append(f"{line:<36}  {key.sentence}")
    blocks = ("\b\n" + "\n".join(lines) for lines in sections.values())
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
and the model as safetensors with the tokenizer, which transformers loads as it is.
"""


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
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
def train_command(recipe: str, nproc: int | None, overrides: tuple[str, ...]) -> None:
    """The command; ``HELP`` is what people read."""
    launch = launched(os.environ)
    if launch is not None:
        _be_a_rank(recipe, overrides, nproc, launch.size)
    elif nproc is None or nproc == 1:
        _run(read_recipe(recipe, overrides))
    else:
        _check(read_recipe(recipe, overrides), nproc)  # before any process is started
        command = [sys.executable, "-m", "shardwise.cli", "train", recipe, *overrides]
        start(command, nproc)


def _check(recipe: Recipe, ranks: int) -> None:
    """What can be known to fail without data, model or processes."""
    accumulation(recipe.batch, ranks)
    check(recipe.run.folder, recipe.run.overwrite)


def _be_a_rank(recipe: str, overrides: tuple[str, ...], nproc: int | None, size: int) -> None:
    """Inside a launcher: leave the reason of a failure where it will look for it."""
    try:
        if nproc not in (None, size):
            raise ConfigError(
                f"--nproc is {nproc}, but a launcher has started {size} processes already; leave "
                "--nproc out, or start without the launcher."
            )
        _run(read_recipe(recipe, overrides))
    except KeyboardInterrupt:
        sys.exit(130)  # the launcher got it too, and says so
    except Exception as error:
        if leave_reason(error):
            sys.exit(1)
        raise


def _run(recipe: Recipe) -> None:
    """This process's rank of the run."""
    with (
        connect(recipe.run.device) as comm,
        reporter(recipe.run.log_every) as report,
        reasons_left(),
    ):
        train(recipe, comm, report)
