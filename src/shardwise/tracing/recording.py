"""A recording of a model's step, beside what was planned, for Perfetto and chrome://tracing.

Two processes are drawn: the schedule, and the recording. An event of the schedule is drawn at the
time at which it was done; one that was not done, at that of the event before it, and is named so.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from shardwise.api.sharded import Sharded
from shardwise.errors.arguments import checked
from shardwise.plan.printed import Schedule
from shardwise.plan.schedule.events import Event, Op


class Timed(NamedTuple):
    """An event and when it was done, in seconds since the recording began."""

    seconds: float
    event: Event


@dataclass(frozen=True)
class Recording:
    """One step, as planned and as done.

    Attributes:
        planned: the schedule as it was before the step.
        rank: whose recording it is.
        done: the events in the order in which they were carried out.
    """

    planned: Schedule
    rank: int
    done: list[Timed] = field(default_factory=list)

    @property
    def events(self) -> tuple[Event, ...]:
        """List the events that were carried out, without times."""
        return tuple(timed.event for timed in self.done)

    def __str__(self) -> str:
        lines = [
            f"# rank {self.rank} of {self.planned.grid.size}, one step of {self.planned.strategy}"
        ]
        lines += [f"{t.seconds * 1e3:9.3f} ms  {t.event.op:<6}  {t.event.unit}" for t in self.done]
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__

    def chrome(self) -> dict[str, Any]:
        """The object that Perfetto and chrome://tracing open, times in microseconds."""
        planned = _planned(self.planned.events, self.done)
        rows = [_name(1, f"planned: {self.planned.strategy}"), *_rows(1, planned)]
        rows += [_name(2, f"rank {self.rank}: done"), *_rows(2, self.done)]
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write ``chrome()`` as JSON."""
        Path(path).write_text(json.dumps(self.chrome()), "utf-8")


@checked
@contextmanager
def record(sharded: Sharded) -> Iterator[Recording]:
    """Record the step that is taken inside: ``with sw.record(sharded) as recording: …``."""
    recording, start = Recording(sharded.schedule, sharded.comm.rank), perf_counter()

    def listen(event: Event) -> None:
        recording.done.append(Timed(perf_counter() - start, event))

    listeners = sharded.runtime.listeners
    listeners.append(listen)
    try:
        yield recording
    finally:
        listeners.remove(listen)


def _planned(planned: Sequence[Event], done: Sequence[Timed]) -> Iterator[Timed]:
    times = defaultdict[tuple[str, ...], deque[float]](deque)
    for seconds, event in done:
        times[event[:3]].append(seconds)
    now = 0.0
    for event in planned:
        if at := times[event[:3]]:
            now = at.popleft()
            yield Timed(now, event)
        else:
            yield Timed(now, event._replace(reason=f"{event.reason} (not done)"))


def _name(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _rows(process: int, timed: Iterable[Timed]) -> Iterator[dict[str, Any]]:
    """Computing as nested slices, collectives as asynchronous ones, frees as instants."""
    begun = dict[tuple[Op, str], dict[str, str]]()
    ends = {Op.ENTER: Op.GATHER, Op.SETTLE: Op.REDUCE}
    for number, (seconds, event) in enumerate(timed):
        name = "" if event.op is Op.END else event.unit or "(root)"
        row = {"pid": process, "tid": 1, "ts": seconds * 1e6, "cat": str(event.phase)}
        row |= {"name": f"{event.op} {name}".rstrip(), "args": {"reason": event.reason}}
        ended = begun.pop((ends.get(event.op, Op.END), event.unit), None)
        if event.op in (Op.ENTER, Op.EXIT):
            yield row | {"name": name, "ph": "BE"[event.op is Op.EXIT]}
        elif event.op in (Op.GATHER, Op.REDUCE):
            # Viewers join begin and end by category and id, in all processes.
            own = {"cat": str(event.op), "id": f"{process}.{number}", "name": f"{event.op} {name}"}
            begun[event.op, event.unit] = own
            yield row | own | {"ph": "b"}
        elif ended is None:
            yield row | {"ph": "i", "s": "t"}
        if ended is not None:
            yield row | ended | {"ph": "e"}
