"""``shardwise report``: write the page of one or two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.report.page import page
from shardwise.report.run import read_run


def run_report(folders: Sequence[Path], output: Path | None) -> None:
    """Write the page of the runs in ``folders`` to ``output``, or beside the first run's files."""
    target = output or folders[0] / "report.html"
    text = page([read_run(folder) for folder in folders]).encode("utf-8", "replace")
    try:
        target.write_bytes(text)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with --output."
        ) from None
    click.echo(f"wrote {target} ({size(len(text))})")
