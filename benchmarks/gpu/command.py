"""``python -m benchmarks gpu …``: from options to a report, a file and a picture."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.gpu import plot, results, table
from benchmarks.gpu.engines import ENGINES, OPTIMIZERS, WIRES
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.run import PARTS, Wanted, run, unavailable

__all__ = ["gpu"]


def _one_of(*known: str) -> click.Choice[str]:
    return click.Choice(known)


@click.command()
@click.option("--world", "worlds", type=click.IntRange(2), multiple=True, help="ranks [8, 64]")
@click.option("--model", "models", type=_one_of(*SHAPES), multiple=True, help="what is trained")
@click.option("--engines", help="comma-separated; all if not given: " + ", ".join(ENGINES))
@click.option("--rounds", type=click.IntRange(2), help="interleaved rounds of laps [20]")
@click.option("--layers", type=click.IntRange(1), help="blocks, instead of the model's own")
@click.option("--tokens", type=click.IntRange(1), help="of a row, instead of the model's own")
@click.option("--bandwidth", type=click.FloatRange(0), help="GB/s of the link; 0: no time at all")
@click.option("--wire", type=_one_of(*WIRES), help="how gradients travel [own]")
@click.option("--optimizer", type=_one_of(*OPTIMIZERS), help="of ours [torch]")
@click.option("--device", type=_one_of("cuda", "cpu"), help="where; cpu tries the harness [cuda]")
@click.option("--part", "parts", type=_one_of(*PARTS), multiple=True, help="what is measured")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write the report")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="draw it (PNG)")
def gpu(
    json_file: Path | None,
    picture: Path | None,
    engines: str | None,
    bandwidth: float | None,
    **asked: object,
) -> None:
    """One rank of many on one CUDA device, with simulated peers, beside FSDP2."""
    given = {name: value for name, value in asked.items() if value}
    if engines:
        given["engines"] = tuple(engines.split(","))
    if bandwidth is not None:
        given["bandwidth"] = bandwidth * 1e9
    wanted = Wanted(**given)  # type: ignore[arg-type]
    if unknown := set(wanted.engines) - set(ENGINES):
        raise click.UsageError(f"no engine {sorted(unknown)}; there are {', '.join(ENGINES)}")
    if why := unavailable(wanted.device):
        raise click.ClickException(why)

    def keep(report: results.Report) -> None:
        if json_file is not None:
            results.write(report, json_file)

    report = run(wanted, lambda text: click.echo(f"… {text}", err=True), keep)
    click.echo("\n".join(table.lines(report)))
    if picture is not None:
        plot.draw(report, picture)
