"""Numbers of one or two runs over their steps, as charts draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.report.run import Line, Run
from shardwise.train.plot import smoothed

MOST_POINTS = 1_500  # of a curve: more than a screen has columns
CHARTS = {
    "loss": "loss, nats per token",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_second": "tokens/s over all ranks",
    "memory": "memory of the process that uses most",
}
Point = tuple[float, float]


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return each chart with its curves, and the restarts and saves to mark in it."""
    return [
        {
            "key": key,
            "title": title,
            "curves": [
                curve for index, run in enumerate(runs) for curve in _curves(key, index, run)
            ],
            "marks": [mark for index, run in enumerate(runs) for mark in _marks(index, run)],
        }
        for key, title in CHARTS.items()
    ]


def _curves(key: str, index: int, run: Run) -> Iterator[dict[str, Any]]:
    """The curves of a run; of the loss its running mean and validation, too."""
    name, points = run.name, _points(run.of("stepped"), key)
    if key != "loss":
        yield _curve(name, index, "line", points)
        return
    means, first = smoothed([loss for _, loss in points])
    middle = [step for step, _ in points][first : first + len(means)]
    yield _curve(f"{name}: each step", index, "faint", points)
    yield _curve(f"{name}: running mean", index, "line", list(zip(middle, means, strict=True)))
    yield _curve(f"{name}: validation", index, "dots", _points(run.of("evaluated"), key))


def _curve(name: str, run: int, style: str, points: list[Point]) -> dict[str, Any]:
    drawn = style if len(points) > 1 else "dots"  # a line of one point is not seen
    return {"name": name, "run": run, "style": drawn, "points": thinned(points)}


def _points(lines: Sequence[Line], key: str) -> list[Point]:
    """Pairs of step and value; steps whose value is not finite are left out."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def _marks(index: int, run: Run) -> Iterator[dict[str, Any]]:
    for kind, label in (("resumed", "restart"), ("saved", "save")):
        yield from ({"run": index, "kind": label, "x": line["step"]} for line in run.of(kind))


def thinned(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and the highest of as many neighbours as needed, so that no spike is lost."""
    size = -(-2 * len(points) // MOST_POINTS)
    if size <= 2:
        return list(points)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    kept = ({min(g, key=lambda p: p[1]), max(g, key=lambda p: p[1])} for g in groups)
    return [point for both in kept for point in sorted(both)]
