"""``python -m benchmarks step …``, ``gpu …``, ``programs …``; with none, a short ``step``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import benchmarks.checkpoint.run as checkpoint_run
import benchmarks.faults.run as faults_run
import benchmarks.gpu.run as gpu_run
import benchmarks.mutants.run as mutants_run
import benchmarks.programs.run as programs_run
import benchmarks.step.run as step_run
from benchmarks.harness import reports
from benchmarks.harness.command import command, follow, log
from benchmarks.harness.report import write
from benchmarks.mutants.tests import FOLDERS
from benchmarks.programs import report as programs_report
from benchmarks.programs.engines import ENGINES as PROGRAM_ENGINES
from benchmarks.programs.program import PROGRAMS
from benchmarks.recorded import table_of, with_tables
from benchmarks.step import profile

RESULTS = Path(__file__).parent / "RESULTS.md"

path_option = click.Path(path_type=Path)
json_option = click.option("--json", "json_file", type=path_option, help="write the report")


def names(known: Sequence[str]) -> click.Choice[str]:
    return click.Choice(list(known))


def saver(path: Path | None) -> Callable[[Any], None]:
    """What keeps a report whenever there is more of it."""
    return lambda report: None if path is None else reports.write(report, path)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; engines, comma-separated, as a tuple."""
    options = {name: value for name, value in options.items() if value not in (None, (), False)}
    if "engines" in options:
        options["engines"] = tuple(options["engines"].split(","))
    return options


def refuse(wrong: str) -> None:
    if wrong:
        raise click.UsageError(wrong)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Side by side against what exists."""
    if context.invoked_subcommand is None:
        follow(step_run.run(step_run.SHORT, log))


main.add_command(command("step", step_run.Config, step_run.run))
main.add_command(command("profile", profile.Config, profile.run))


main.add_command(command("gpu", gpu_run.Config, gpu_run.run))
main.add_command(command("checkpoint", checkpoint_run.Config, checkpoint_run.run))


main.add_command(command("faults", faults_run.Config, faults_run.run))


@main.command()
@click.option("--world", type=click.IntRange(2), default=2, show_default=True, help="ranks")
@click.option("--only", multiple=True, type=names([*PROGRAMS]), help="which [all]")
@click.option("--engine", "engines", multiple=True, type=names([*PROGRAM_ENGINES]), help="[all]")
@json_option
def programs(
    world: int, only: tuple[str, ...], engines: tuple[str, ...], json_file: Path | None
) -> None:
    """Run programs as users write them, and compare with plain PyTorch."""
    report = programs_run.run(world, only or [*PROGRAMS], engines or [*PROGRAM_ENGINES], log)
    saver(json_file)(report)
    click.echo("\n".join(programs_report.lines(report)))


@main.command()
@click.option("--sample", default=200, type=click.IntRange(1), show_default=True, help="mutants")
@click.option("--seed", default=0, show_default=True, help="of the random sample")
@click.option("--jobs", default=2, type=click.IntRange(1), show_default=True, help="at a time")
@json_option
@click.argument("folders", nargs=-1)
def mutants(
    folders: tuple[str, ...], sample: int, seed: int, jobs: int, json_file: Path | None
) -> None:
    """Change the engine's code (FOLDERS of the package) at random; do its tests notice?"""
    chosen = folders or FOLDERS
    report = mutants_run.run(mutants_run.Config(chosen, sample, seed, jobs), log)
    if json_file is not None:
        write(report, json_file)
    click.echo("\n".join(report.lines()))


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def show(files: tuple[Path, ...]) -> None:
    """Print recorded reports as tables."""
    click.echo("\n\n".join(map(table_of, files)))


@main.command()
def record() -> None:
    """Make the tables in RESULTS.md anew from benchmarks/results/."""
    RESULTS.write_text(with_tables(RESULTS.read_text(), RESULTS.parent))


if __name__ == "__main__":
    main()
