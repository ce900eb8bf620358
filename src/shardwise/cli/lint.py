"""``shardwise lint FILE``: the defects of programs and options, each with its line and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.cli.format_names import escape
from shardwise.dialects.lint import DEFECTS, lint
from shardwise.train.records import plural


def run_lint(paths: Sequence[Path]) -> int:
    """Print the findings of each file; returns the exit status, 1 if there is any."""
    count = 0
    for path in paths:
        for finding in lint(path):
            count += 1
            click.echo(f"{escape(path)}:{finding.line}: {finding.defect} {finding.fact}")
            click.echo(f"    fix: {finding.fix}")
    rules = sum("why_not" not in row for row in DEFECTS.values())
    amounts = plural(count, "defect"), plural(rules, "rule"), plural(len(paths), "file")
    click.echo(", ".join(amounts))
    return int(count > 0)


def run_rules() -> None:
    """Print what is looked for."""
    for name, row in DEFECTS.items():
        if "why_not" not in row:
            click.echo(f"{name.partition('-')[0]:<4} {row['fact'].format(*'………')}")
