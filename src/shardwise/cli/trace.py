"""``shardwise trace``: a step's programs, stage by stage, or of two strategies side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from textwrap import wrap as wrapped
from typing import Any

import click
import torch

from shardwise.cli.models import named_model
from shardwise.cli.tables import table
from shardwise.errors import ConfigError, nearest
from shardwise.tracing.stages import Stage, Trace, trace
from shardwise.units import wrap

__all__ = ["Asked", "run_trace", "side_by_side"]

STAR_LINE = "*" * 56  # between the forward and the backward program
SIDE = 62  # characters of one side
FOLDED = 3  # equal lines that are shown around a difference


@dataclass(frozen=True)
class Asked:
    """What the command was asked for.

    Attributes:
        strategy, world, rank: what is traced.
        wrap: class names of units; none = the model's repeated blocks.
        compute: dtype that is computed in; ``None`` = as stored.
        stage: a stage's name; ``None`` = what runs.
        every: show the programs of every stage.
        diff: two strategies to compare.
    """

    strategy: str
    world: int
    rank: int
    wrap: tuple[str, ...] = ()
    compute: str | None = None
    stage: str | None = None
    every: bool = False
    diff: tuple[str, str] | None = None

    def trace(self, model: Any, inputs: Any, strategy: str) -> Trace:
        precision: dict[str, Any] = {}
        if self.compute is not None:
            from shardwise.precision import Precision

            precision["precision"] = Precision(compute=getattr(torch, self.compute))
        units = wrap.by_class(*self.wrap) if self.wrap else None
        return trace(model, inputs, strategy, (self.rank, self.world), units, **precision)


def run_trace(model: str | None, asked: Asked) -> None:
    """Print what was asked for."""
    found = named_model(model)
    if found.inputs is None:
        raise ConfigError(
            f"{model} gives no input, so there is nothing to trace. Let it return both: "
            "return model, torch.randn(8, 64)."
        )
    strategies = asked.diff or (asked.strategy,)
    traces = [asked.trace(found.model, found.inputs, strategy) for strategy in strategies]
    lines = _compared(*traces) if asked.diff else _programs(traces[0], asked)
    click.echo("\n".join(lines))


def _programs(traced: Trace, asked: Asked) -> Iterator[str]:
    if asked.stage is None and not asked.every:
        yield from _overview(traced)
    for stage in _chosen(traced.stages, asked):
        yield ""
        if asked.every or asked.stage:
            yield from (f"# {line}" for line in wrapped(f"{stage.name}: {stage.does}", 94))
        yield stage.forward.text
        if stage.backward is not None:
            yield STAR_LINE
            yield stage.backward.text


def _chosen(stages: Sequence[Stage], asked: Asked) -> Sequence[Stage]:
    if asked.every:
        return stages
    if asked.stage is None:
        return stages[-1:]
    if chosen := [stage for stage in stages if stage.name == asked.stage]:
        return chosen
    names = [stage.name for stage in stages]
    raise ConfigError(
        f"there is no stage {asked.stage!r}; nearest is {nearest(asked.stage, names)[0]!r}. "
        f"Stages are {', '.join(names)}."
    )


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
        for op in ("gather", "reduce", "spread"):
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
        if kind == "equal":
            yield from _folded([_row(line, " ", line) for line in left[a:b]])
            continue
        paired = min(b - a, d - c)
        for one, other in zip(left[a : a + paired], right[c : c + paired], strict=True):
            yield _row(one, "|", other)
        yield from (_row(line, "<", "") for line in left[a + paired : b])
        yield from (_row("", ">", line) for line in right[c + paired : d])


def _row(left: str, mark: str, right: str) -> str:
    return f"{_cut(left):<{SIDE}} {mark} {_cut(right)}".rstrip()


def _cut(line: str) -> str:
    return line if len(line) <= SIDE else line[: SIDE - 1] + "…"


def _folded(rows: list[str]) -> list[str]:
    hidden = len(rows) - 2 * FOLDED
    if hidden < 3:
        return rows
    return [*rows[:FOLDED], f"    … {hidden} lines are equal", *rows[-FOLDED:]]
