"""Tables of forecasts beside what this machine takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median, quantiles

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Cell, Column, Report, Table
from benchmarks.harness.rounds import slowest
from benchmarks.harness.workers import on_ranks
from benchmarks.here.memory import BUILD, PEAKS, ROWS, peak_row
from benchmarks.here.subjects import calibrated, forecast_of
from benchmarks.models import ON_CPU
from benchmarks.programs import PROGRAMS
from benchmarks.step.engines import Setup
from benchmarks.step.measure import measure
from shardwise.plan.forecast.machine import Machine

TASKS = ("decoder128", "decoder32", "small", "conv", "lora", *PROGRAMS)
STRATEGIES = ("no_shard", "zero1", "full_shard")
TRANSPORTS = {"messages": "", "memory": "_memory"}  # and how their engines' names end
TIMES = (
    Column("program"), Column("strategy"), Column("over"), Column("ms", ".1f"),
    Column("forecast", ".1f"), Column("off %", "+.0f"), Column("most of it"),
)  # fmt: skip
NOTES = """
ms         median of the rounds' steps, each until its slowest rank is done; engines take turns
forecast   after a calibration on as many ranks, over the same transport, just before
""".strip().splitlines()
PEAK_NOTES = """
start      proportional set size of a rank before the model is there, its libraries loaded; mean
tensors    what lives at once at most, by the forecast
forecast   start, and what a process comes to hold: the engine's pages, and blocks of the C library
peak       proportional set size of a rank at most in its first three steps, by the kernel; mean of
           the ranks, and of three runs in new processes the one between; least–most of the three
""".strip().splitlines()
WANTED = 5  # per cent


@dataclass(frozen=True)
class Config:
    """What to compare."""

    model: tuple[str, ...] = setting(TASKS, "what is trained", (*ON_CPU, *PROGRAMS))
    transport: tuple[str, ...] = setting(tuple(TRANSPORTS), "between ranks", TRANSPORTS)
    part: tuple[str, ...] = setting(("time", "memory"), "what is compared", ("time", "memory"))
    world: tuple[int, ...] = setting((2, 4), "numbers of ranks whose memory is measured")
    rounds: int = setting(5, "interleaved rounds of steps", least=2)


def run(config: Config, log: Log) -> Iterator[Report]:
    """Step times, or processes' peaks, of this machine beside their forecasts."""
    if "time" in config.part:
        yield from _times(config, log)
    if "memory" in config.part:
        yield from _peaks(config, log)


def _times(config: Config, log: Log) -> Iterator[Report]:
    rows: list[tuple[Cell, ...]] = []
    for transport, name in product(config.transport, config.model):
        if name == config.model[0]:
            log(f"calibration over {transport}")
            machine = calibrated(2, transport)
        log(f"{name}, over {transport}, {config.rounds} rounds")
        rows += _timed(name, transport, machine, config.rounds)
        yield Report(this_machine(), (), (Table("", TIMES, tuple(rows)),), notes_of(rows))


def _timed(name: str, transport: str, machine: Machine, rounds: int) -> Iterator[tuple[Cell, ...]]:
    ending = TRANSPORTS[transport]
    engines = [strategy + ending for strategy in STRATEGIES]
    ranks = on_ranks(2, measure, Setup(name), engines, rounds)
    for strategy, engine in zip(STRATEGIES, engines, strict=True):
        laps = slowest([rank[engine].laps for rank in ranks], lambda lap: lap.whole)
        seconds = median(lap.whole for lap in laps)
        time = forecast_of(Setup(name).task, machine, strategy, shared=bool(ending)).time
        off, bound = time.seconds / seconds - 1, max(time.parts, key=time.parts.__getitem__)
        yield name, strategy, transport, 1e3 * seconds, 1e3 * time.seconds, 100 * off, bound


def _peaks(config: Config, log: Log) -> Iterator[Report]:
    rows: list[tuple[Cell, ...]] = []
    for world in config.world:
        log(f"calibration on {world} ranks")
        machine = calibrated(world, "messages")
        for model, recompute, count in product(BUILD, (False, True), ROWS):
            log(f"memory of {model}, {count} rows, {world} ranks, recomputed: {recompute}")
            rows.append(peak_row(model, machine, count, recompute))
            table = Table("", PEAKS, tuple(rows))
            yield Report(this_machine(), (), (table,), (*PEAK_NOTES, "", _line(rows)))


def _line(rows: Sequence[Sequence[Cell]]) -> str:
    sizes = [abs(float(row[-1] or 0)) for row in rows]
    within, most = sum(size <= WANTED for size in sizes), max(sizes)
    return (
        f"foresight process: {len(sizes)} peaks, median {median(sizes):.1f}%, most {most:.1f}%, "
        f"{within} within {WANTED}%"
    )


def notes_of(rows: Sequence[Sequence[Cell]]) -> tuple[str, ...]:
    """What the columns mean, and how far forecasts are off."""
    off = [float(row[5] or 0) for row in rows]
    sizes = [abs(each) for each in off]
    most = quantiles(sizes, n=10, method="inclusive")[8] if len(sizes) > 1 else sizes[0]
    line = f"{len(off)} step times, median {median(sizes):.1f}%, p90 {most:.1f}%"
    return (*NOTES, "", f"foresight here: {line}, bias {median(off):+.1f}%")
