"""``shardwise watch``: a run in the terminal while it trains, from its metrics.jsonl alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise.cli.format_records import clock
from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.report.run import Run, read_run
from shardwise.train.folder import is_locked
from shardwise.train.records import plural

EVERY = 1.0  # seconds between two frames
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 48  # of a sparkline
PHASES = {
    "prepared": "building the model",
    "preparedsamples": "building the model",
    "streamed": "building the model",
    "built": "taking the first step",
    "resumed": "taking the first step",
    "sampled": "writing the results",
    "placed": "writing the results",
    "finished": "finished",
    "stopped": "stopped on request; the same command resumes it",
    "complete": "finished",
}


def run_watch(path: Path, once: bool) -> None:
    """Show the run in ``path`` until it ends, or one frame."""
    is_running = is_locked(path)
    run = _read(path, is_running)
    if once:
        Console(highlight=False).print(frame(run, is_running, time.time()))
        return
    with Live(frame(run, is_running, time.time()), auto_refresh=False) as live:
        while is_running:
            time.sleep(EVERY)
            is_running = is_locked(path)  # first: then the file has all that the run has written
            run = _read(path, is_running)
            live.update(frame(run, is_running, time.time()), refresh=True)


def _read(path: Path, is_running: bool) -> Run:
    """The run in ``path``; one that still prepares its data has no records."""
    try:
        return read_run(path)
    except ConfigError:
        if not is_running:
            raise
        return Run(path.resolve().name, (), {}, None)


def frame(run: Run, is_running: bool, now: float) -> Table:
    """One frame; ``now`` in seconds since 1970."""
    table = Table.grid(padding=(0, 2))
    for label, value in rows(run, is_running, now):
        table.add_row(Text(label, "dim"), Text(value))
    return table


def rows(run: Run, is_running: bool, now: float) -> list[tuple[str, str]]:
    """Return the lines of a frame. Pure; what the run has not written yet is left out."""
    shown = [("run", run.name), ("phase", phase(run, is_running, now))]
    if built := run.last("built"):
        over = f"{built['strategy']} over {plural(built['ranks'], 'rank')}"
        shown.append(("model", f"{built['parameters']:,} parameters, {over}"))
    if step := run.last("stepped"):
        seconds = step["seconds_left"]
        losses = [line["loss"] for line in run.of("stepped") if line["loss"] is not None]
        shown += [
            ("step", f"{step['step']:,} of {step['steps']:,}"),
            ("loss", f"{losses[-1]:.4f}  {sparkline(losses)}" if losses else "not finite"),
            ("tokens/s", f"{step['tokens_per_second']:,.0f}"),
            *[("left", "not known yet" if seconds is None else clock(seconds))] * is_running,
            ("memory", f"{size(step['memory'])} of the process that uses most"),
        ]
    if evaluated := run.last("evaluated"):
        loss = "not finite" if evaluated["loss"] is None else f"{evaluated['loss']:.4f}"
        shown.append(("validation", f"{loss} at step {evaluated['step']:,}"))
    if saved := run.last("saved"):
        ago = clock(max(0.0, now - saved["time"]))
        shown.append(("last save", f"step {saved['step']:,}, {size(saved['nbytes'])}, {ago} ago"))
    if restarts := run.of("resumed"):
        shown.append(("restarts", f"{len(restarts)}, the last at step {restarts[-1]['step']:,}"))
    return shown


def phase(run: Run, is_running: bool, now: float) -> str:
    """Say what the run does, by its last record."""
    if not run.lines:
        return "preparing data"
    last = run.lines[-1]
    if last["record"] in ("finished", "stopped", "complete"):
        is_early = last["record"] != "stopped" and run.why_early
        return f"finished early: {run.why_early}" if is_early else PHASES[last["record"]]
    if not is_running:
        return (
            "not running, and not finished: it was killed, or crashed; the same command resumes it"
        )
    return f"{PHASES.get(last['record'], 'training')}, last record {clock(now - last['time'])} ago"


def sparkline(values: Sequence[float]) -> str:
    """Draw the values as one line of bars, each the mean of its neighbours."""
    per_bar = max(1, -(-len(values) // COLUMNS))
    groups = [values[start : start + per_bar] for start in range(0, len(values), per_bar)]
    means = [sum(group) / len(group) for group in groups]
    low, span = min(means), max(means) - min(means) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)
