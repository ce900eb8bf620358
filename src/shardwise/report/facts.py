"""Tables of a report: results, differences of recipes, units, machine, samples. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.plan.printed import size
from shardwise.recipe.recipe import keys
from shardwise.report.run import Line, Run
from shardwise.train.comparison import beside, more
from shardwise.train.records import plural

MISSING, NOT_FINISHED = "missing", "not finished"
Rows = list[list[str]]


def results(runs: Sequence[Run]) -> Rows:
    """Numbers that a reader looks for first, a column for each run."""
    return [[label, *(_shown(value, run) for run in runs)] for label, value in _RESULTS.items()]


def _shown(value: Callable[[Run], str], run: Run) -> str:
    try:
        return value(run)
    except (KeyError, TypeError):  # a record that the run does not have, or a number not finite
        return MISSING


def _ending(run: Run) -> str:
    kinds = [line["record"] for line in run.lines]
    ends = {"finished": "finished", "stopped": "stopped on request", "resumed": NOT_FINISHED}
    ending = next((ends[kind] for kind in reversed(kinds) if kind in ends), NOT_FINISHED)
    return f"finished early: {run.why_early}" if ending == "finished" and run.why_early else ending


def _both(run: Run, term: str, form: Callable[[Any], str]) -> str:
    compared = run.last("compared")
    return beside(compared[f"planned_{term}"], compared[term], form)


_RESULTS: dict[str, Callable[[Run], str]] = {
    "steps": lambda r: "{step:,} of {steps:,}".format(**r.last("stepped")),
    "ended": _ending,
    "training loss": lambda r: f"{r.last('stepped')['loss']:.4f}",
    "validation loss": lambda r: f"{r.last('evaluated')['loss']:.4f}",
    "unigram baseline": lambda r: f"{r.last('evaluated')['unigram_entropy']:.4f}",
    "tokens/s": lambda r: f"{r.last('stepped')['tokens_per_second']:,.0f}",
    "tokens": lambda r: f"{r.last('stepped')['tokens']:,}",
    "seconds": lambda r: f"{r.lines[-1]['elapsed']:,.1f}" if r.lines else MISSING,
    "restarts": lambda r: f"{len(r.of('resumed'))}",
    "parameters": lambda r: f"{r.last('built')['parameters']:,}",
    "sharding": lambda r: (
        f"{r.last('built')['strategy']} over {plural(r.last('built')['ranks'], 'rank')}"
    ),
    "batch": lambda r: "{rows} = {micro} × {accumulation} × {ranks}".format(**r.last("built")),
    "dtypes": lambda r: "; ".join(r.last("built")["dtypes"]),
    "memory": lambda r: size(r.last("stepped")["memory"]),
    "memory in a step": lambda r: _both(r, "memory", size),
    "tokens/s beside the plan": lambda r: _both(r, "rate", "{:,.0f}".format),
    "MFU": lambda r: _both(r, "mfu", "{:.1%}".format),
    "machine": lambda r: r.last("built")["machine"],
    "versions": lambda r: ", ".join(f"{n} {v}" for n, v in r.last("built")["versions"].items()),
}


def recipe_rows(runs: Sequence[Run]) -> Rows:
    """Keys that differ from their default in some run: key, default, each run's value."""
    rows = [[name, default, *values] for name, default, values in _keys(runs)]
    return [list(map(_written, row)) for row in rows if any(_differs(v, row[1]) for v in row[2:])]


def differences(runs: Sequence[Run]) -> Rows:
    """Keys whose values differ between the runs, with each run's value."""
    rows = [[name, *values] for name, _, values in _keys(runs)]
    return [list(map(_written, row)) for row in rows if any(_differs(v, row[1]) for v in row[2:])]


def _keys(runs: Sequence[Run]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each key, its default, and its values; a key that a run's version had not has its default."""
    defaults = {key.name: key.default for key in keys()}
    for name in dict.fromkeys(name for run in runs for name in run.recipe):
        default = defaults.get(name)
        yield name, default, [run.recipe.get(name, default) if run.recipe else None for run in runs]


def _differs(value: Any, other: Any) -> bool:
    return _written(value) != _written(other)


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}" if not value else str(dict(value))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def unit_rows(run: Run) -> Rows:
    """Units with their elements, and bytes of all of it and on one rank."""
    units: Sequence[Line] = run.last("built").get("units", ())
    return [
        [u["name"] or "(root)", f"{u['numel']:,}", size(u["gathered"]), size(u["shard"])]
        for u in units
    ]


def memory_rows(run: Run) -> Rows:
    """Bytes of each kind at most in the recorded step: planned, measured, and their difference."""
    step = run.step or {}
    if step.get("planned_most") is None:
        return []
    columns = zip(*(nbytes for _, nbytes, _ in step["moments"]), strict=True)
    most = {kind: max(column) for kind, column in zip(step["kinds"], columns, strict=True)}
    planned = step["planned_most"]
    return [
        [kind, size(planned[kind]), size(most[kind]), more(planned[kind], most[kind])]
        for kind in step["kinds"]
    ]


def samples(run: Run) -> Rows:
    """Prompts and what the model wrote."""
    return [[line["prompt"], line["text"]] for line in run.of("sampled")]


def warnings(run: Run) -> list[str]:
    """Warnings of a run, each once."""
    return list(dict.fromkeys(line["message"] for line in run.of("warned")))
