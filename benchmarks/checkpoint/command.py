"""``python -m benchmarks checkpoint``."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.checkpoint import results, table
from benchmarks.checkpoint.run import Wanted, run

__all__ = ["checkpoint"]


@click.command()
@click.option("--world", "worlds", help="numbers of ranks, comma-separated [2]")
@click.option("--gigabytes", type=click.FloatRange(0.001), help="parameters and moments [1.1]")
@click.option("--rounds", type=click.IntRange(1), help="interleaved rounds [5]")
@click.option(
    "--folder", "folders", multiple=True, type=click.Path(path_type=Path, exists=True),
    help="one on each file system; without: a temporary one, and memory",
)  # fmt: skip
@click.option("--no-memory", is_flag=True, help="times alone")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write the report")
def checkpoint(
    worlds: str | None,
    json_file: Path | None,
    no_memory: bool,
    **asked: object,
) -> None:
    """Save and load 1.1 GB: time, memory and bytes, beside DCP and torch.save."""
    given = {name: value for name, value in asked.items() if value}
    try:
        ranks = tuple(int(word) for word in (worlds or "2").split(","))
    except ValueError:
        raise click.UsageError(f"--world is {worlds!r}; it must be numbers such as 2,4") from None
    wanted = Wanted(worlds=ranks, memory=not no_memory, **given)  # type: ignore[arg-type]

    def keep(report: results.Report) -> None:
        if json_file is not None:
            results.write(report, json_file)

    report = run(wanted, lambda text: click.echo(f"… {text}", err=True), keep)
    click.echo("\n".join(table.lines(report)))
