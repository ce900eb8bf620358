"""A comparison of programs as text: a line for each program, a column for each engine."""

from __future__ import annotations

from benchmarks.programs.results import VERDICTS, Report


def lines(report: Report) -> list[str]:
    """The whole report."""
    engines = list(dict.fromkeys(outcome.engine for outcome in report.outcomes))
    programs = {outcome.program: outcome for outcome in report.outcomes}
    verdicts = {(o.program, o.engine): o.verdict for o in report.outcomes}
    width = max(map(len, programs))
    text = [
        str(report.machine),
        "",
        f"{report.world} ranks, each program against plain PyTorch",
        "",
    ]
    for name, outcome in programs.items():
        columns = "  ".join(f"{verdicts[name, engine]:<13}" for engine in engines)
        text.append(f"{name:<{width}}  {columns}  {outcome.about}")
    head = "  ".join(f"{engine:<13}" for engine in engines)
    text.insert(4, f"{'program':<{width}}  {head}  what it does")
    bad = [outcome for outcome in report.outcomes if outcome.verdict != "equal"]
    text += ["", *(f"{engine}: {_summary(report, engine)}" for engine in engines)]
    return [*text, "", *(f"{o.engine}, {o.program}: {o.verdict}: {o.detail}" for o in bad)]


def _summary(report: Report, engine: str) -> str:
    verdicts = [outcome.verdict for outcome in report.outcomes if outcome.engine == engine]
    counts = [(verdicts.count(verdict), verdict) for verdict in VERDICTS]
    return f"{len(verdicts)} programs: " + ", ".join(f"{n} {v}" for n, v in counts if n)
