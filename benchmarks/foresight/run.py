"""The forecasts beside published results: a table by class, and what no case could be made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.foresight.fit import Fit, Judgement, judge
from benchmarks.foresight.memory import memory_errors, settled
from benchmarks.foresight.plans import Plan, plan_of
from benchmarks.foresight.rows import PUBLISHED, Case, read
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Row, Table
from shardwise.errors import ShardwiseError
from shardwise.plan.forecast.machine import known

WORST = 10
CLASSES = {  # error wanted of the mean, and of the 90th percentile
    "seen": (8, 18),
    "calibrated": (8, 18),
    "unseen": (15, 30),
}
COLUMNS = (
    Column("class"), Column("rows"), Column("MAPE %", ".1f"), Column("median %", ".1f"),
    Column("p90 %", ".1f"), Column("wanted"),
)  # fmt: skip
SOURCES = (Column("source"), Column("accelerator"), Column("rows"), Column("bias %", "+.1f"),
           Column("MAPE %", ".1f"))  # fmt: skip
HARD = (Column("row"), Column("what"), Column("measured", ",.0f"), Column("forecast", ",.0f"),
        Column("off %", "+.0f"))  # fmt: skip
PEAKS = (Column("row"), Column("what"), Column("GiB", ".1f"), Column("forecast", ".1f"),
         Column("off %", "+.0f"))  # fmt: skip
GIB = 2**30
NOTES = """
class       seen: judged by a fit on other rows, some of the same source. unseen: by a fit without
            the row's source; documents of one folder are one source. calibrated: the same, where
            one row of the source and accelerator was measured, and corrects the others: the mean
            over which row that is
error       of tokens per second and accelerator, relative to what was measured
by source   forecasts by a fit without the source
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to judge."""

    rows: str = setting("", "a CSV file with the columns of the published one; none: that one")


def run(config: Config, log: Log) -> Iterator[Report]:
    """Forecasts of throughput and memory beside published results, sources left out."""
    published, others = _read(PUBLISHED)
    log(f"{len(published)} published rows as plans, and their fit")
    fit = Fit.of(_plans(published, others))
    cases, plans = published, fit.plans
    if config.rows:
        cases, others = _read(Path(config.rows))
        log(f"{len(cases)} rows of {config.rows} as plans")
        plans = _plans(cases, others)
    log("fits without each source")
    judgement = judge(plans, fit)
    log("memory")
    memory = memory_errors(cases, others)
    tables = (
        _classes(judgement),
        _by_source(plans, judgement),
        _hardest(plans, judgement),
        _worst_peaks(memory),
        _others(others),
    )
    lines = (*NOTES, "", *_constants(fit), "", *summary(judgement, [*map(abs, memory.values())]))
    settings = (f"{len(cases)} rows of {Path(config.rows or PUBLISHED).name} are plans",)
    yield Report(this_machine(), settings, tables, lines)


def _read(path: Path) -> tuple[list[Case], dict[str, list[str]]]:
    cases, others = read(path)
    return [settled(case) for case in cases], others


def _plans(cases: Sequence[Case], others: dict[str, list[str]]) -> list[Plan]:
    """Plans of cases that state a throughput; a case without a plan is added to ``others``."""
    plans = []
    for case in cases:
        try:
            plans += [plan_of(case)] if case.tokens_per_second else []
        except ShardwiseError as reason:
            others.setdefault(str(reason), []).append(case.number)
    return plans


def summary(judgement: Judgement, memory: Sequence[float]) -> Iterator[str]:
    """One line for each class, and one for memory."""
    for name in CLASSES:
        yield _line(name, _sizes(judgement, name), "MAPE", fmean)
    yield _line("memory", memory, "median", median)


def _line(
    name: str, errors: Sequence[float], of: str, middle: Callable[[Sequence[float]], float]
) -> str:
    line = f"foresight {name}: {len(errors)} rows"
    return (
        f"{line}, {of} {100 * middle(errors):.1f}%, p90 {100 * _p90(errors):.1f}%"
        if errors
        else line
    )


def _sizes(judgement: Judgement, name: str) -> list[float]:
    return [abs(error) for error in getattr(judgement, name).values()]


def _p90(errors: Sequence[float]) -> float:
    return quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else errors[0]


MIDDLES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "MAPE %": fmean,
    "median %": median,
    "p90 %": _p90,
}


def _classes(judgement: Judgement) -> Table:
    rows: dict[str, Row] = {}
    for name, (mean, most) in CLASSES.items():
        errors = _sizes(judgement, name)
        rows[name] = {"rows": len(errors), "wanted": f"{mean} and {most}"}
        for column, middle in MIDDLES.items() if errors else ():
            rows[name][column] = 100 * middle(errors)
    share = judgement.right / max(1, judgement.pairs)
    order = f"{share:.1%} of {judgement.pairs:,} pairs of one source that differ by more than 5 %"
    return Table.of("by class", COLUMNS, rows, (f"in the right order: {order}",))


def _by_source(plans: Sequence[Plan], judgement: Judgement) -> Table:
    groups: dict[tuple[str, str], list[float]] = {}
    for plan in plans:
        groups.setdefault(plan.case.group, []).append(judgement.unseen[plan.case.number])
    by_size = sorted(groups.items(), key=lambda item: -len(item[1]))
    cells = tuple(
        (source, accelerator, len(errors), 100 * median(errors), 100 * fmean(map(abs, errors)))
        for (source, accelerator), errors in by_size
    )
    return Table("by source", SOURCES, cells)


def _hardest(plans: Sequence[Plan], judgement: Judgement) -> Table:
    errors = judgement.unseen
    hardest = sorted(plans, key=lambda plan: -abs(errors[plan.case.number]))[:WORST]
    cells = tuple((p.case.number, p.case.title, *_off(p, errors)) for p in hardest)
    return Table("the worst rows, by a fit without their source", HARD, cells)


def _worst_peaks(errors: Mapping[Case, float]) -> Table:
    worst = sorted(errors, key=lambda case: -abs(errors[case]))[:WORST]
    cells = tuple((c.number, c.title, *_peaks(c, errors[c])) for c in worst)
    return Table("the worst peaks of memory", PEAKS, cells)


def _peaks(case: Case, error: float) -> tuple[float, float, float]:
    published = (case.memory or 0) / GIB
    return published, published * (1 + error), 100 * error


def _off(plan: Plan, errors: Mapping[str, float]) -> tuple[float, float, float]:
    measured, error = plan.measured, errors[plan.case.number]
    return measured, measured * (1 + error), 100 * error


def _others(others: Mapping[str, Sequence[str]]) -> Table:
    columns = Column("no plan expresses"), Column("rows"), Column("numbers")
    cells = tuple(
        (reason, len(numbers), " ".join(numbers[:8]) + (" …" if len(numbers) > 8 else ""))
        for reason, numbers in sorted(others.items(), key=lambda item: -len(item[1]))
    )
    return Table("", columns, cells)


def _constants(fit: Fit) -> Iterator[str]:
    """The constants as ``machines.toml`` has them."""
    fitted = fit.fitted
    yield "constants, fitted on all published rows:"
    values = asdict(fitted.constants())
    yield "  " + ", ".join(f"{name} = {value:.3g}" for name, value in values.items())
    for name in sorted({name for name, _ in fitted.names if name}):
        one = fitted.accelerator(known().accelerator(name))
        yield f"  {name}: products = {one.products:.3f}, attention = {one.attention:.3f}"
