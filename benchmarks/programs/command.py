"""``python -m benchmarks programs …``: what users write, under shardwise and under FSDP2."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.programs import results, table
from benchmarks.programs.engines import ENGINES
from benchmarks.programs.program import PROGRAMS
from benchmarks.programs.run import run

__all__ = ["programs"]


@click.command()
@click.option("--world", type=click.IntRange(2), default=2, show_default=True, help="ranks")
@click.option("--only", multiple=True, type=click.Choice(list(PROGRAMS)), help="which [all]")
@click.option("--engine", "engines", multiple=True, type=click.Choice(list(ENGINES)), help="[all]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write the report")
def programs(
    world: int, only: tuple[str, ...], engines: tuple[str, ...], json_file: Path | None
) -> None:
    """Run programs as users write them, and compare with plain PyTorch."""
    chosen = engines or tuple(ENGINES)
    report = run(
        world, only or tuple(PROGRAMS), chosen, lambda text: click.echo(f"… {text}", err=True)
    )
    if json_file is not None:
        results.write(report, json_file)
    click.echo("\n".join(table.lines(report)))
