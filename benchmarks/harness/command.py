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
    """A field of a benchmark's settings, which is frozen: one option of its command.

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
    """The command of this name.

    Args:
        name: what is typed.
        config: a dataclass whose fields are made by ``setting``.
        run: measures, and yields the report whenever there is more of it.
    """

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
    """Say what is under way, beside the report."""
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
    known, least = setting.metadata["known"], setting.metadata["least"]
    default, kind = setting.default, type(setting.default)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    choices = f"; of {', '.join(known)}" if known and set(known) != {*shown.split(",")} else ""
    return click.Option(
        [f"--{setting.name}"],
        type=_kind(default, known, least),
        default=default,
        is_flag=kind is bool,
        help=f"{setting.metadata['text']}{choices} [{shown}]",
    )


def _kind(default: Any, known: tuple[str, ...], least: int | None) -> click.ParamType[Any]:
    if isinstance(default, tuple):
        return _Several(int if default and isinstance(default[0], int) else str, known)
    if known:
        return click.Choice(known)
    if isinstance(default, int):
        return click.BOOL if isinstance(default, bool) else click.IntRange(min=least)
    return click.STRING if isinstance(default, str) else click.FLOAT


class _Several(click.ParamType[tuple[Any, ...]]):
    """Values separated by commas, as a tuple."""

    name = "list"

    def __init__(self, kind: type[int | str], known: tuple[str, ...]) -> None:
        self._kind = kind
        self._known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = value.split(",")
        if self._known and (unknown := sorted({*words} - {*self._known})):
            self.fail(f"{unknown} is none of {', '.join(self._known)}", param, ctx)
        try:
            return tuple(map(self._kind, words))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 2,4", param, ctx)
