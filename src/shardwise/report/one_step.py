"""One recorded step: what computed when, what was on the link meanwhile, and memory by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MOST_MOMENTS = 6_000  # of a page: with more it would be larger than 2 MB
BEGINS = {"gather": "enter", "reduce": "settle"}  # what is on the link → what awaits it
Moment = tuple[float, Sequence[int], Sequence[str] | None]


class Slice(NamedTuple):
    """Something that takes time.

    Attributes:
        row: of its lane; nested calls lie below the call around them.
    """

    lane: str
    row: int
    start: float
    stop: float
    label: str
    reason: str


def drawn(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The slices and the memory of a recorded step; ``None`` if no step was recorded."""
    if step is None:
        return None
    moments: list[Moment] = step["moments"]
    shown = moments[:MOST_MOMENTS]
    planned = zip(shown, step.get("planned", ()), strict=False)
    return {
        "step": step["step"],
        "left_out": len(moments) - len(shown),
        "slices": list(slices(shown)),
        "kinds": step["kinds"],
        "memory": [[seconds, *nbytes] for seconds, nbytes, _ in shown],
        "planned": [(seconds, n) for (seconds, *_), (_, n) in planned if n is not None],
    }


def slices(moments: Sequence[Moment]) -> Iterator[Slice]:
    """Calls of units from enter to exit, transfers until they are awaited, and the update."""
    calls: list[tuple[float, str]] = []
    sent: dict[tuple[str, str], tuple[float, int, str]] = {}
    passed = None  # when the last pass ended
    for seconds, _, event in moments:
        if event is None:
            continue
        op, unit, phase, reason = event
        if op == "enter":
            calls.append((seconds, unit))
        if op == "exit" and calls:
            start, _ = calls.pop()
            yield Slice("computation", len(calls), start, seconds, unit or "(root)", phase)
        if op in BEGINS:
            rows = {row for _, row, _ in sent.values()}
            row = next(row for row in range(len(rows) + 1) if row not in rows)
            sent[BEGINS[op], unit] = seconds, row, f"{op} {unit or '(root)'}: {reason}"
        if begun := sent.pop((op, unit), None):
            start, row, label = begun
            yield Slice("link", row, start, seconds, label.partition(":")[0], label)
        if op in ("end", "settle"):
            passed = seconds
    if passed is not None and moments[-1][2] is None:
        stop = moments[-1][0]
        yield Slice(
            "computation", 0, passed, stop, "update", "gradients are clipped, parameters updated"
        )
