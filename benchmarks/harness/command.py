"""A benchmark as a command: its settings are the options, its report is printed, drawn and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.harness import plots
from benchmarks.harness.report import Report, write

Config = TypeVar("Config")
Log = Callable[[str], None]


def setting(default: Any, text: str, known: Iterable[str] = (), least: int | None = None) -> Any:
    """A field of a benchmark's settings, which is one option of its command.

    Args:
        default: its type is the option's; a tuple takes values separated by commas.
        text: what it is, for ``--help``.
        known: the values that there are; any if empty.
        least: the smallest number that is taken.
    """
    return field(default=default, metadata={"text": text, "known": tuple(known), "least": least})


def command(
    name: str, config: type[Config], run: Callable[[Config, Log], Iterator[Report]]
) -> click.Command:
    """The command ``name``: ``run`` yields the report whenever there is more of it."""

    def measure(json: Path | None, plot: Path | None, **values: Any) -> None:
        follow(run(config(**values), log), json, plot)

    path = click.Path(path_type=Path)
    options = [
        *map(_option, fields(config)),  # type: ignore[arg-type]
        click.Option(["--json"], type=path, help="write the report to this file"),
        click.Option(["--plot"], type=path, help="draw the report into this file (PNG)"),
    ]
    text = (run.__doc__ or "").partition("\n\n")[0]
    return click.Command(name, callback=measure, params=[*options], help=text)


def log(text: str) -> None:
    """Print what is under way, beside the report."""
    click.echo(f"… {text}", err=True)


def follow(reports: Iterable[Report], json: Path | None = None, plot: Path | None = None) -> None:
    """Keep each report, then print and draw the last one. Ends with 1 where it has failures."""
    for report in reports:
        if json is not None:
            write(report, json)
    click.echo("\n".join(report.lines()))
    if plot is not None:
        plots.draw(report, plot)
    if report.failures:
        raise SystemExit(1)


def _option(setting: Field[Any]) -> click.Option:
    default: Any = setting.default
    known = setting.metadata["known"]
    several = isinstance(default, tuple)
    one = next(iter(default), "") if several else default
    kind = click.Choice(known) if known else _kind(one, setting.metadata["least"])
    shown = ",".join(map(str, default)) if several else str(default)
    choices = f"; of {', '.join(known)}" if known and set(known) != {*shown.split(",")} else ""
    return click.Option(
        [f"--{setting.name}"],
        type=_Several(kind) if several else kind,
        default=default,
        is_flag=isinstance(default, bool),
        help=f"{setting.metadata['text']}{choices} [{shown}]",
    )


def _kind(default: Any, least: int | None) -> click.ParamType[Any]:
    if isinstance(default, bool | str):
        return click.BOOL if isinstance(default, bool) else click.STRING
    return click.IntRange(min=least) if isinstance(default, int) else click.FLOAT


class _Several(click.ParamType[tuple[Any, ...]]):
    """Values of one kind separated by commas, as a tuple."""

    name = "list"

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._kind.convert(word, param, ctx) for word in value.split(","))
