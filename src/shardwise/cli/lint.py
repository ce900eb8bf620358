"""``shardwise lint FILE``: the defects of programs and options, each with its line and a fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardwise.cli.format_names import escape, escape_lines
from shardwise.dialects.lint import DEFECTS, lint
from shardwise.errors import ConfigError
from shardwise.train.records import plural


def run_lint(paths: Sequence[Path]) -> int:
    """Print the findings of each file; returns the exit status, 1 if one has any or is not read."""
    count = unread = 0
    for path in paths:
        try:
            findings = list(lint(path))
        except ConfigError as error:  # the others may have defects
            click.echo(f"error: {escape_lines(str(error))}", err=True)
            unread += 1
            continue
        for finding in findings:
            count += 1
            click.echo(f"{escape(path)}:{finding.line}: {finding.defect} {finding.fact}")
            click.echo(f"    fix: {finding.fix}")
    rules = sum("why_not" not in row for row in DEFECTS.values())
    amounts = plural(count, "defect"), plural(rules, "rule"), plural(len(paths) - unread, "file")
    click.echo(", ".join([*amounts, *[f"{unread} not read"] * bool(unread)]))
    return int(count + unread > 0)


def run_rules() -> None:
    """Print what is looked for."""
    for name, row in DEFECTS.items():
        if "why_not" not in row:
            click.echo(f"{name.partition('-')[0]:<4} {row['fact'].format(*'………')}")
