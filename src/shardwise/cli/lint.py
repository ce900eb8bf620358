"""``shardwise lint FILE``: the defects of programs and options, each with its line and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.cli.format_names import escape
from shardwise.lint import lint

__all__ = ["run_lint"]


def run_lint(paths: Sequence[Path]) -> int:
    """Print the findings of each file; returns the exit status, 1 if there is any."""
    count = 0
    for path in paths:
        for finding in lint(path):
            count += 1
            click.echo(f"{escape(path)}:{finding.line}: {finding.defect} {finding.fact}")
            click.echo(f"    fix: {finding.fix}")
    return int(count > 0)
