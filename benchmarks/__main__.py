"""``python -m benchmarks step …``, ``gpu …``, ``checkpoint …``; with none, a short ``step``."""

from __future__ import annotations

from pathlib import Path

import click

import benchmarks.checkpoint.run
import benchmarks.faults.run
import benchmarks.finetune.run
import benchmarks.foresight.run
import benchmarks.gpu.run
import benchmarks.here.run
import benchmarks.mutants.run
import benchmarks.scorecard.run
import benchmarks.slowlinks.run
import benchmarks.soak.run
import benchmarks.start.run
import benchmarks.step.run
from benchmarks.harness.command import command, follow, log
from benchmarks.harness.report import read, with_tables

RESULTS = Path(__file__).parent / "RESULTS.md"


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Side by side against what exists."""
    if context.invoked_subcommand is None:
        follow(benchmarks.step.run.run(benchmarks.step.run.SHORT, log))


PLANNED = ("foresight",)  # nothing is run, for it judges forecasts
RUN = (
    "step",
    "gpu",
    "checkpoint",
    "faults",
    "finetune",
    "here",
    "mutants",
    "scorecard",
    "slowlinks",
    "soak",
    "start",
)
for name in (*PLANNED, *RUN):
    module = getattr(benchmarks, name).run
    main.add_command(command(name, module.Config, module.run))


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def show(files: tuple[Path, ...]) -> None:
    """Print recorded reports."""
    click.echo("\n\n".join("\n".join(read(file).lines()) for file in files))


@main.command()
def record() -> None:
    """Make the tables in RESULTS.md anew from benchmarks/results/."""
    RESULTS.write_text(with_tables(RESULTS.read_text(), RESULTS.parent))


if __name__ == "__main__":
    main()
