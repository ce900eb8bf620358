"""``shardwise train RECIPE --rehearse``: the recipe in small, on two ranks and on one, compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from shardwise.cli.other_libraries import without_their_noise
from shardwise.cli.tables import table
from shardwise.errors import ShardwiseError
from shardwise.recipe.read import to_yaml
from shardwise.recipe.recipe import Recipe
from shardwise.train.rehearsal import RANKS, Rehearsal


def run_rehearsal(recipe: Recipe) -> None:
    """Print what is smaller, run it twice, and print what that proves.

    Raises:
        ShardwiseError: a run failed, or they differ.
    """
    rehearsal = Rehearsal.beside(recipe)
    click.echo(f"rehearsal of {recipe.run.folder}: the same path on {RANKS} CPU ranks, in small:")
    lines = table(map(list, rehearsal.changes()), ["key", "recipe", "here"], left=3)
    click.echo("\n".join([*lines, ""]))
    for ranks in (RANKS, 1):
        path = rehearsal.folder / f"ranks-{ranks}.yaml"
        path.write_text(to_yaml(rehearsal.small(ranks)), "utf-8")
        _run(path, ranks)
    click.echo("")
    with without_their_noise():
        for sentence in rehearsal.proof():
            click.echo(f"proved    {sentence}")


def _run(path: Path, ranks: int) -> None:
    """Run a recipe; the run on one rank is only compared, so its output is not shown."""
    command = [sys.executable, "-m", "shardwise.cli", "train", str(path), "--nproc", str(ranks)]
    # The command is this program.
    is_quiet = ranks == 1
    done = subprocess.run(command, capture_output=is_quiet, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise ShardwiseError(
            f"the rehearsal on {ranks} rank{'s' * (ranks > 1)} failed with status "
            f"{done.returncode}. {done.stderr or 'Its message is above.'}"
        )
