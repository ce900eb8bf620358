"""Records to the terminal: plain lines, and on a terminal one line that moves.

A log file gets one line every so many steps and no control characters. A terminal gets a
line that is rewritten at every step, with the lasting ones (validation, results) above it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardwise.cli.lines import lines
from shardwise.train.metrics import Built, Emit, Prepared, Record, Stepped

__all__ = ["reporter"]


@contextmanager
def reporter(log_every: int, again: bool = False) -> Iterator[Emit]:
    """What rank 0 tells the user with.

    Args:
        log_every: steps between lines where stdout is not a terminal.
        again: this is the same run after a crash, so what it is need not be said anew.
    """
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        with _moving(console) as emit:
            yield _after_the_beginning(emit) if again else emit
    else:
        plain = functools.partial(_plain, log_every=log_every)
        yield _after_the_beginning(plain) if again else plain


def _after_the_beginning(emit: Emit) -> Emit:
    """``emit``, but for the records that were told before."""

    def rest(record: Record) -> None:
        if not isinstance(record, Prepared | Built):
            emit(record)

    return rest


def _plain(record: Record, log_every: int) -> None:
    if isinstance(record, Stepped) and not _is_due(record, log_every):
        return
    for line in lines(record):
        click.echo(line)  # flushes, so that a log file can be followed


def _is_due(record: Stepped, log_every: int) -> bool:
    return record.step % log_every == 0 or record.step in (1, record.steps)


@contextmanager
def _moving(console: Console) -> Iterator[Emit]:
    # Started by the first step, so that the other ranks never touch the terminal.
    live = Live(console=console, transient=True, refresh_per_second=4)

    def emit(record: Record) -> None:
        text = "\n".join(lines(record))
        if isinstance(record, Stepped) and record.step < record.steps:
            live.start()
            live.update(Text(text, no_wrap=True, overflow="ellipsis"))
            return
        if isinstance(record, Stepped):
            live.stop()  # the last step stays
        console.print(Text(text))

    try:
        yield emit
    finally:
        live.stop()
