"""Commands about one run or two; they read its folder, and train nothing."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.options import FILE, PATH

# --- report ----------------------------------------------------------------------------------


@click.command("report", short_help="Write a page about one or two runs.")
@click.argument("run", type=PATH)
@click.argument("other", required=False, type=PATH, metavar="[RUN2]")
@click.option("--output", type=FILE, help="The file to write.  [default: RUN/report.html]")
def report(run: Path, other: Path | None, output: Path | None) -> None:
    """Write one HTML page about a run, or about two runs laid over each other.

    It asks for nothing from anywhere: mail it, or open it on a phone. Every number is from the
    files in the run's folder, and what they do not have is said to be missing.

    \b
    Examples:
      shardwise report runs/demo
      shardwise report runs/one runs/two --output compared.html
    """
    from shardwise.cli.report import run_report

    run_report([run, *filter(None, [other])], output)


@click.command("watch", short_help="Show a run while it trains.")
@click.argument("run", type=PATH)
@click.option("--once", is_flag=True, help="Print one frame.")
def watch(run: Path, once: bool) -> None:
    """Show the run in the folder RUN until it ends: phase, step, loss, tokens/s, last save."""
    from shardwise.cli.watch import run_watch

    run_watch(run, once)
