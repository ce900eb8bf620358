"""``python -m benchmarks faults …``: kill training at every moment of a save, start it again."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.faults import results, table
from benchmarks.faults.run import PARTS, run

__all__ = ["faults"]


@click.command()
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="which [all]")
@click.option("--random", "count", type=click.IntRange(1), default=30, help="random deaths [30]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write the report")
def faults(parts: tuple[str, ...], count: int, json_file: Path | None) -> None:
    """Kill ranks and launchers at every moment of a save, and start them again."""
    report = run(parts or PARTS, count, lambda text: click.echo(f"… {text}", err=True))
    if json_file is not None:
        results.write(report, json_file)
    click.echo("\n".join(table.lines(report)))
    if report.wrong:
        raise SystemExit(1)
