"""The command ``shardwise doctor`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shardwise.cli.options import COUNT, FILE, NUMBER


@click.command("doctor", short_help="Show what this machine has, and check the engine on it.")
@click.option("--conformance", is_flag=True, help="Check the engine on the devices that are here.")
@click.option("--device", help="Such as cpu.  [default: what torch sees]")
@click.option(
    "--nproc",
    type=COUNT,
    help="Ranks of --conformance.  [default: one for each device, two on a CPU]",
)
@click.option(
    "--output",
    type=FILE,
    help="Write the result as JSON.  [default: shardwise-conformance.json with --conformance, "
    "shardwise-nodes.json with --nodes]",
)
@click.option("--nodes", is_flag=True, help="Look at all nodes together; run it on each of them.")
@click.option("--nnodes", type=COUNT, help="Of --nodes, without a launcher.")
@click.option("--node-rank", type=NUMBER, help="Of --nodes: which this one is.")
@click.option("--master", metavar="HOST:PORT", help="Of --nodes: where node-rank 0 is reached.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Of --nodes: where runs lie.  [default: here]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Of --nodes: seconds in which all nodes have to come.",
)
@click.option("--recipe", help="Of --nodes: compare what it says on each of them.")
def doctor(nodes: bool, output: Path | None, **options: Any) -> None:
    """Show what this machine has: versions, devices, backends, environment.

    With --conformance: run the engine on its devices. One line for each check, with what is
    expected and what was found: collectives, sums, dtypes, training under every strategy beside one
    process, DDP and FSDP2, saving and loading; then the time and the memory of a step. The lines
    are written as a page of text beside the JSON: both can be sent to the authors.

    With --nodes, on every node: what would keep them from training together, before they do, and
    the links between them as a file for `shardwise plan`: docs/many-machines.md.

    \b
    Examples:
      shardwise doctor
      shardwise doctor --conformance --output result.json
      torchrun --nnodes 2 … -m shardwise.cli doctor --conformance
      shardwise doctor --nodes --nnodes 2 --node-rank 0 --master 10.0.0.2:29500
      torchrun --nnodes 2 … -m shardwise.cli doctor --nodes

    \b
    Exit status: 0 if all is well; 1 if something is missing, or a check did not pass.
    """
    given = click.get_current_context().get_parameter_source
    keys = ("nnodes", "node_rank", "master", "folder", "timeout", "recipe")
    of_nodes = {key: options.pop(key) for key in keys}
    others = ("conformance", "device", "nproc") if nodes else keys
    for key in others:
        if given(key) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{key.replace('_', '-')} is not of --nodes; leave one of them out."
                if nodes
                else f"--{key.replace('_', '-')} is of --nodes; pass that, too."
            )
    if nodes:
        from shardwise.cli.doctor_nodes import NodesOptions, run_doctor_nodes

        return run_doctor_nodes(NodesOptions(**of_nodes), output)
    from shardwise.cli.doctor import run_doctor

    return run_doctor(output=output, **options)
