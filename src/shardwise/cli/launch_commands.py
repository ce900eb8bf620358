"""Commands that start a run on several machines, or ask how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from shardwise.cli.options import COUNT, EXISTING_FILE, FILE, NUMBER, OVERRIDES, WITH_OVERRIDES

# --- launch ----------------------------------------------------------------------------------


@click.command(
    "launch", short_help="Start a run on several machines.", context_settings=WITH_OVERRIDES
)
@click.argument("recipe", type=click.Path())
@click.option("--nodes", type=COUNT, help="Machines.")
@click.option("--nproc", type=COUNT, help="Ranks of each machine.")
@click.option("--hosts", help="Names or addresses of all machines, by rank, with commas.")
@click.option(
    "--hostfile",
    "host_file",
    type=EXISTING_FILE,
    help="A file with a line HOST slots=N for each machine.",
)
@click.option("--address", help="Of node 0.  [default: a private one of this host]")
@click.option("--port", type=click.IntRange(1, 65_535), help="At that address.")
@click.option("--interface", help="Network interface of every machine.  [default: found]")
@click.option("--restarts", type=NUMBER, help="After a rank died.")
@click.option("--node-rank", type=NUMBER, help="With --start: which this is.")
@click.option("--start", is_flag=True, help="Start this node's ranks, by torchrun.")
@click.option("--slurm", is_flag=True, help="Write a batch script of SLURM.")
@click.option("--mpi", is_flag=True, help="Become mpirun.")
@click.option("--ray", is_flag=True, help="Write a program for Ray Train.")
@click.option("--k8s", is_flag=True, help="Write a TrainJob for Kubernetes.")
@click.option("--sky", is_flag=True, help="Write a task of SkyPilot.")
@click.option("--image", default="shardwise", show_default=True, help="Of --k8s: the Dockerfile's.")
@click.option("--accelerator", default="H100", show_default=True, help="Of --sky.")
@click.option("--output", type=FILE, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file to write.")
@OVERRIDES
def launch(recipe: str, overrides: tuple[str, ...], hosts: str | None, **options: Any) -> None:
    """Print or write what starts RECIPE on several machines: docs/many-machines.md.

    \b
    What starts the ranks:
      (nothing)   torchrun: a line to paste on each node; with --start, become torchrun on this one
      --slurm     a batch script, which saves before its time is up and goes on
      --mpi       becomes mpirun, with cores for each rank
      --ray       a program for Ray Train
      --k8s       a TrainJob of Kubeflow Trainer
      --sky       a task of SkyPilot

    What a recipe's section `launch` says need not be said again. Every rank needs the same recipe
    and the same version. The printed token is secret.

    \b
    Examples:
      shardwise launch my.yaml --nodes 2 --nproc 8
      shardwise launch my.yaml --slurm --nodes 4 --nproc 8 --run.steps 1000
      shardwise launch my.yaml --mpi --hostfile hosts
    """
    from shardwise.cli.launch import LaunchOptions, run_launch

    launchers = [by for by in ("slurm", "mpi", "ray", "k8s", "sky") if options.pop(by)]
    if len(launchers) > 1:
        raise click.UsageError(f"--{' and --'.join(launchers)} exclude each other; pass one.")
    keys = ("nodes", "nproc", "address", "port", "interface", "restarts")
    given = {"by": next(iter(launchers), None)} | {key: options.pop(key) for key in keys}
    given["hosts"] = None if hosts is None else json.dumps(hosts.split(","))
    run_launch((recipe, *overrides), given, LaunchOptions(**options))


# --- init ------------------------------------------------------------------------------------


@click.command("init", short_help="Ask, and write a recipe.")
@click.argument("file", type=FILE)
@click.option("--recipe", default="demo", show_default=True, help="The recipe to start from.")
@click.option("--accelerate", type=EXISTING_FILE, help="What `accelerate config` wrote.")
@click.option("--yes", is_flag=True, help="Ask nothing: take what is offered.")
def init(file: Path, recipe: str, accelerate: Path | None, yes: bool) -> None:
    """Ask a few questions, and write FILE: one recipe for every machine.

    The questions are those of `accelerate config`; what it wrote is offered as answers. FILE says
    nothing of one machine alone, so the same file serves on all of them.

    \b
    Examples:
      shardwise init my.yaml
      shardwise init my.yaml --accelerate default_config.yaml --yes
    """
    from shardwise.cli.init import run_init

    run_init(file, recipe, accelerate, yes)
