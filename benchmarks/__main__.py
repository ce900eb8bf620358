"""``python -m benchmarks step …``, ``gpu …``, ``programs …``; with none, a short ``step``."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.checkpoint.command import checkpoint
from benchmarks.faults.command import faults
from benchmarks.gpu.command import gpu
from benchmarks.programs.command import programs
from benchmarks.recorded import told, with_tables
from benchmarks.step import plot, results, table
from benchmarks.step.engines import ENGINES, OPTIMIZERS
from benchmarks.step.models import TASKS
from benchmarks.step.profile import profile, profile_host
from benchmarks.step.run import PARTS, SHORT, Wanted, run

RESULTS = Path(__file__).parent / "RESULTS.md"


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Side by side against what exists."""
    if context.invoked_subcommand is None:
        context.invoke(step, short=True)


main.add_command(gpu)
main.add_command(checkpoint)
main.add_command(faults)
main.add_command(programs)


def _names(known: list[str]) -> click.Choice[str]:
    return click.Choice(known)


@main.command()
@click.option("--world", "worlds", type=click.IntRange(2), multiple=True, help="ranks [2]")
@click.option("--model", "models", type=_names(list(TASKS)), multiple=True, help="what is trained")
@click.option("--engines", help="comma-separated; all if not given: " + ", ".join(ENGINES))
@click.option("--rounds", type=click.IntRange(2), help="interleaved rounds [20]")
@click.option("--optimizer", type=_names(list(OPTIMIZERS)), help="of every engine [adamw]")
@click.option("--part", "parts", type=_names(list(PARTS)), multiple=True, help="what is measured")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write the report")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="draw it (PNG)")
@click.option("--short", is_flag=True, help="one model, few rounds: under three minutes")
def step(
    short: bool = False,
    json_file: Path | None = None,
    picture: Path | None = None,
    engines: str | None = None,
    **asked: object,
) -> None:
    """Time, memory, bytes and host time of one training step, every engine in turn."""
    start = SHORT if short else Wanted()
    given = {name: value for name, value in asked.items() if value}
    if engines:
        given["engines"] = tuple(engines.split(","))
    wanted = Wanted(**{**vars(start), **given})
    if unknown := set(wanted.engines) - set(ENGINES):
        raise click.UsageError(f"no engine {sorted(unknown)}; there are {', '.join(ENGINES)}")

    def keep(report: results.Report) -> None:
        if json_file is not None:
            results.write(report, json_file)

    report = run(wanted, lambda text: click.echo(f"… {text}", err=True), keep)
    click.echo("\n".join(table.lines(report)))
    if picture is not None:
        plot.draw(report, picture)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def show(files: tuple[Path, ...]) -> None:
    """Print recorded reports as tables."""
    click.echo("\n\n".join(map(told, files)))


@main.command()
def record() -> None:
    """Make the tables in RESULTS.md anew from benchmarks/results/."""
    text = RESULTS.read_text()
    RESULTS.write_text(with_tables(text, RESULTS.parent))


@main.command("profile")
@click.option("--engine", default="full_shard", type=_names(list(ENGINES)), show_default=True)
@click.option("--model", default="decoder32", type=_names(list(TASKS)), show_default=True)
@click.option("--world", default=2, type=click.IntRange(1), show_default=True)
@click.option("--steps", default=10, type=click.IntRange(1), show_default=True)
@click.option("--host", type=click.IntRange(1), help="instead: N parameters a unit, fake world 8")
def profile_command(engine: str, model: str, world: int, steps: int, host: int | None) -> None:
    """Where the time of one engine's step goes, on rank 0."""
    said = profile_host(engine, host, steps) if host else profile(engine, model, world, steps)
    click.echo("\n".join(said))


if __name__ == "__main__":
    main()
