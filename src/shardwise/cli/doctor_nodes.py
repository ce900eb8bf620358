"""``shardwise doctor --nodes``: what would keep nodes from training together, and their links."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from shardwise.cli.tables import table
from shardwise.comm.machine.environment import Launch, read_launch
from shardwise.doctor.links import Measured
from shardwise.doctor.node_findings import Finding
from shardwise.doctor.nodes import Report, examine
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.error_files import write_error_file
from shardwise.launch.launcher import exit_with_launcher
from shardwise.recipe.read import flatten, read_recipe

RESULT = Path("shardwise-nodes.json")


@dataclass(frozen=True)
class NodesOptions:
    """The place where the nodes meet, if no launcher says it, and what is looked at."""

    nnodes: int | None = None
    node_rank: int | None = None
    master: str | None = None
    folder: Path = Path()
    timeout: float = 300.0
    recipe: str | None = None


def run_doctor_nodes(options: NodesOptions, output: Path | None) -> None:
    """Examine all nodes; raises where something would keep them from training together."""
    if (variables := _variables(options)) is not None:
        os.environ.update(variables)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    launch = read_launch(os.environ)
    if launch is None or not launch.address:
        raise ConfigError(
            "which nodes there are is not known. Start it on every node as the run is to be "
            "started (torchrun …, srun …, mpirun … -m shardwise.cli doctor --nodes), or say it: "
            "shardwise doctor --nodes --nnodes 2 --node-rank 0 --master 10.0.0.2:29500"
        )
    exit_with_launcher(os.environ)
    try:
        recipe = flatten(read_recipe(options.recipe).model_dump()) if options.recipe else {}
        keys = {name: str(value) for name, value in recipe.items()}
        report = examine(launch, options.timeout, options.folder, _print_findings, keys)
        _show(report, launch, output or RESULT)
    except ShardwiseError as error:
        if write_error_file(error):
            click.echo(f"error: {error}", err=True)
            raise SystemExit(1) from None
        raise


def _variables(options: NodesOptions) -> dict[str, str] | None:
    """The variables of a launcher that started one rank on each node; ``None``: one has."""
    if (options.nnodes, options.node_rank, options.master) == (None, None, None):
        return None
    if options.nnodes is None or options.node_rank is None or options.master is None:
        raise ConfigError("--nnodes, --node-rank and --master belong together; say all three.")
    host, _, port = options.master.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--master {options.master} is not HOST:PORT, such as 10.0.0.2:29500.")
    if options.node_rank >= options.nnodes:
        raise ConfigError(
            f"--node-rank {options.node_rank} is none of {options.nnodes} nodes (--nnodes), which "
            f"are numbered from 0 to {options.nnodes - 1}."
        )
    return {
        "RANK": str(options.node_rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(options.nnodes),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
    }


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(_text(finding))


def _text(finding: Finding) -> str:
    level = "PROBLEM" if finding.stops else "note   "
    return f"{level}  {finding.what}\n    why     {finding.why}\n    change  {finding.change}"


def _show(report: Report, launch: Launch, path: Path) -> None:
    """Print and write what was found, on rank 0; the others say where it is."""
    problems = [finding.what for finding in report.findings if finding.stops]
    if launch.rank == 0:
        _print_findings(report.findings)
        click.echo("\n".join(["", *_node_lines(report), "", *_link_lines(report)]))
        path.write_text(json.dumps(report.as_json(), indent=2) + "\n", "utf-8")
        use = f": shardwise plan --machines {path} --link measured …" if report.links else ""
        click.echo(f"\nwritten   {path}{use}")
    elif launch.local_rank == 0:
        click.echo(f"rank {launch.rank}    {len(report.findings)} findings; rank 0 prints them")
    if problems:
        raise ShardwiseError(f"the nodes are not ready to train together: {'; '.join(problems)}.")


def _node_lines(report: Report) -> list[str]:
    rows = [
        (
            str(node.rank),
            node.host,
            node.interface,
            node.address,
            f"{node.free / 1e9:,.0f} GB",
            f"{node.write / 1e6:,.0f} MB/s",
        )
        for node in report.nodes
    ]
    return table(rows, ["rank", "host", "interface", "address", "disk free", "written"], left=4)


def _link_lines(report: Report) -> list[str]:
    head = ["from rank", "to rank", "latency", "bandwidth", "clock ahead"]
    return table(map(_link_row, report.links), head, left=2)


def _link_row(link: Measured) -> tuple[str, ...]:
    if link.problem:
        return str(link.source), str(link.target), "-", link.problem, "-"
    return (
        str(link.source),
        str(link.target),
        f"{link.latency * 1e6:,.0f} µs",
        f"{link.bandwidth / 1e6:,.1f} MB/s",
        f"{link.skew * 1e3:,.1f} ms",
    )
