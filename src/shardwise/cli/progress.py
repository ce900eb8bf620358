"""Prints records: plain lines, and on a terminal a progress line below them.

A log file, or a terminal that cannot rewrite a line, gets one line every so many steps and no
control characters. A terminal gets the same lines, cut to its width, and below them one that is
rewritten at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.text import Text

from shardwise.cli.format_records import format_record, format_step
from shardwise.train.records import Built, Emit, Prepared, PreparedSamples, Record, Stepped


@contextmanager
def reporter(log_every: int, restarted: bool = False) -> Iterator[Emit]:
    """The function with which rank 0 prints records.

    Args:
        log_every: steps between lines that stay.
        restarted: the launcher has restarted this run, so data and model are not printed again.
    """
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with _live_line(console, log_every) as emit:
            yield _without_start(emit) if restarted else emit
    else:
        plain = functools.partial(_plain, log_every=log_every)
        yield _without_start(plain) if restarted else plain


def _without_start(emit: Emit) -> Emit:
    """``emit`` without the records of data and model."""

    def emit_rest(record: Record) -> None:
        if not isinstance(record, Prepared | PreparedSamples | Built):
            emit(record)

    return emit_rest


def _plain(record: Record, log_every: int) -> None:
    if isinstance(record, Stepped) and not _is_due(record, log_every):
        return
    for line in format_record(record):
        click.echo(line)  # flushes, so that a log file can be followed


def _is_due(record: Stepped, log_every: int) -> bool:
    return record.step % log_every == 0 or record.step in (1, record.steps)


def working(what: str) -> Status:
    """A line on stderr while the block works, gone at its end; nothing where no terminal is."""
    return Console(stderr=True).status(Text(what), spinner="line")  # of ASCII


@contextmanager
def _live_line(console: Console, log_every: int) -> Iterator[Emit]:
    # Started by the first step, so that the other ranks never touch the terminal.
    live = Live(console=console, transient=True, refresh_per_second=4)

    def emit(record: Record) -> None:
        if not isinstance(record, Stepped):
            console.print(Text("\n".join(format_record(record))))
            return
        line = Text(format_step(record, console.width), no_wrap=True, overflow="ellipsis")
        is_due = _is_due(record, log_every)
        live.update(Text() if is_due else line, refresh=is_due)
        if record.step == record.steps:
            live.stop()
        else:
            live.start()
        if is_due:
            console.print(line)

    try:
        yield emit
    finally:
        live.stop()
