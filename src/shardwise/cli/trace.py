"""``shardwise trace``: a step's programs, stage by stage, or of two strategies side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from math import prod
from textwrap import wrap as wrapped

import click

from shardwise.cli.models import named_model
from shardwise.cli.tables import table
from shardwise.errors import ConfigError, nearest
from shardwise.plan.draw import mesh_of
from shardwise.tracing.stages import Stage, Trace, trace

STAR_LINE = "*" * 56  # between the forward and the backward program
SIDE = 62  # characters of one side
FOLDED = 3  # equal lines that are shown around a difference


def run_trace(
    model: str | None,
    *,
    strategy: str | None,
    world: int | None,
    rank: int,
    stage: str | None,
    diff: tuple[str, str] | None,
    mesh: tuple[int, int] | None,
) -> None:
    """Print a stage's program (``None``: what runs), or those of two strategies side by side."""
    named = named_model(model)
    if named.inputs is None:
        raise ConfigError(
            f"{model} returns no input, so there is nothing to trace. Return both: return model, "
            "torch.randn(8, 64)."
        )
    ranks = rank, world or prod(mesh or (2,))
    traces = [
        trace(named.model, named.inputs, name, ranks, mesh=mesh_of(name, mesh) if diff else mesh)
        for name in diff or (strategy or "full_shard",)
    ]
    click.echo("\n".join(_compared(*traces) if diff else _programs(traces[0], stage)))


def _programs(traced: Trace, name: str | None) -> Iterator[str]:
    stage = traced.stages[-1] if name is None else _stage_of(traced.stages, name)
    if name is None:
        yield from _overview(traced)
    else:
        yield from (f"# {line}" for line in wrapped(f"{stage.name}: {stage.does}", 94))
    yield ""
    yield stage.forward.text
    if stage.backward is not None:
        yield STAR_LINE
        yield stage.backward.text


def _stage_of(stages: Sequence[Stage], name: str) -> Stage:
    by_name = {stage.name: stage for stage in stages}
    if name not in by_name:
        raise ConfigError(
            f"there is no stage {name!r}; nearest is {nearest(name, by_name)[0]!r}. "
            f"Stages are {', '.join(by_name)}."
        )
    return by_name[name]


def _overview(traced: Trace) -> Iterator[str]:
    yield str(traced.schedule).partition("\n")[0]
    yield ""
    for number, stage in enumerate(traced.stages, 1):
        first, *more = wrapped(stage.does, 76)
        yield f"{number}. {stage.name:<16} {first}"
        yield from (f"{'':<20}{line}" for line in more)


# --- two strategies --------------------------------------------------------------------------


def _compared(left: Trace, right: Trace) -> Iterator[str]:
    names = [left.schedule.strategy, right.schedule.strategy]
    yield from table(_counts(left, right), ["", *names])
    for half in ("forward", "backward"):
        # Primitives: in the last stage each line is longer by the comm.
        one, other = (getattr(side.stages[-2], half) for side in (left, right))
        yield f"\n{f'{half} of {names[0]}':<{SIDE}}   {half} of {names[1]}"
        yield f"{'-' * SIDE}   {'-' * SIDE}"
        yield from side_by_side(one.statements, other.statements)


def _counts(left: Trace, right: Trace) -> Iterator[list[str]]:
    for half in ("forward", "backward"):
        for op in ("update", "gather", "reduce", "spread"):
            counts = [
                [c.op for c in getattr(side, half).collectives].count(op) for side in (left, right)
            ]
            if any(counts):
                yield [f"{half}: {op}", *map(str, counts)]
    sent = [sum(c.sent for c in side.collectives) for side in (left, right)]
    yield ["bytes that a rank sends", *(f"{nbytes:,}" for nbytes in sent)]


def side_by_side(left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    """Two lists of lines in two columns; long runs of equal lines are folded.

    Between them ``|`` marks lines that differ, ``<`` and ``>`` those of one side alone.
    """
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        pairs = zip_longest(left[a:b], right[c:d], fillvalue="")
        rows = [f"{_cut(one):<{SIDE}} {_mark(one, other)} {_cut(other)}" for one, other in pairs]
        yield from _folded(rows) if kind == "equal" else map(str.rstrip, rows)


def _mark(one: str, other: str) -> str:
    if one == other:
        return " "
    return "|" if one and other else "<" if one else ">"


def _cut(line: str) -> str:
    return line if len(line) <= SIDE else line[: SIDE - 1] + "…"


def _folded(rows: list[str]) -> list[str]:
    hidden = len(rows) - 2 * FOLDED
    if hidden < 3:
        return rows
    return [*rows[:FOLDED], f"    … {hidden} lines are equal", *rows[-FOLDED:]]
