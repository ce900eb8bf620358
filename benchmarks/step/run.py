"""Which processes run, one after the other, and the table that comes of what they measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import torch

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Cell, Column, Report, Row, Table
from benchmarks.harness.rounds import paired, slowest
from benchmarks.harness.workers import on_ranks
from benchmarks.models import ON_CPU
from benchmarks.programs import PROGRAMS
from benchmarks.step.engines import ENGINES, PLAIN, WHEN_NAMED, Setup, absent
from benchmarks.step.host import HOSTED, host_table, update_table
from benchmarks.step.measure import Measured, measure, peak_memory, profile
from benchmarks.step.programs import COLUMNS as PROGRAM_COLUMNS
from benchmarks.step.programs import program_row
from benchmarks.step.traffic import least_bytes

BY = {
    "adamw": "adamw, torch's fused kernel, for every engine; by sw.optim for ours",
    "torch": "torch.optim.AdamW with its defaults, for every engine",
    "sgd": "torch.optim sgd, its loop on CPU, for every engine",
}
PARTS = ("time", "memory", "host", "update")
COLUMNS = (
    Column("engine"),
    Column("× plain", ".3f", drawn=True), Column("q1", ".2f"), Column("q3", ".2f"),
    Column("min ×", ".3f"), Column("ms", ".1f"), Column("min ms", ".1f"),
    Column("compute", ".1f"), Column("update", ".1f"),
    Column("MB sent", ".2f"), Column("least", ".2f"), Column("sent ÷", ".3f"),
    Column("MB copied", ".2f"), Column("MiB peak", ".0f"), Column("− start", ".0f"),
    Column("÷ 16 P", ".2f"),
)  # fmt: skip
NOTES = """
× plain    median over rounds of the step ÷ the plain step (no communication) of that round, with
           its quartiles q1 and q3; a step lasts until its slowest rank is done
ms         medians; compute = forward and backward, update = optimizer.step() and zero_grad()
MB sent    10⁶ bytes per rank and step, as the kernel counts them; least: what must be sent
sent ÷     below 1 where a unit that stays gathered between its two uses is not sent twice
MB copied  beyond the plain step's own copies, without those inside the backend's threads
MiB peak   proportional set size summed over ranks, each engine in processes of its own;
           − start: without Python, torch and the group; ÷ 16 P: that, in 16 bytes a parameter
*          in processes of its own, beside a plain step of its own
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    world: tuple[int, ...] = setting((2,), "numbers of ranks")
    model: tuple[str, ...] = setting(("decoder128", "decoder32"), "what is trained", ON_CPU)
    engines: tuple[str, ...] = setting(
        tuple(name for name in ENGINES if name not in WHEN_NAMED), "beside the plain step", ENGINES
    )
    rounds: int = setting(20, "interleaved rounds of steps", least=2)
    optimizer: str = setting("adamw", "of every engine", BY)
    part: tuple[str, ...] = setting(PARTS, "what is measured", (*PARTS, "profile", "programs"))
    steps: int = setting(30, "of the host, optimizer and profile measurements", least=2)


#: What ``make bench`` runs, in less than three minutes.
SHORT = Config(model=("decoder32",), rounds=6, part=("time", "host", "update"), steps=10)


def run(config: Config, log: Log) -> Iterator[Report]:
    """Time, memory, bytes and host time of one training step, every engine in turn."""
    notes = tuple(NOTES) if {"time", "memory"} & set(config.part) else ()
    report = Report(this_machine(), (f"optimizer: {BY[config.optimizer]}",), notes=notes)
    for table in _every_table(config, log):
        others = [each for each in report.tables if each.title != table.title]
        report = replace(report, tables=(*others, table))
        yield report


def _every_table(config: Config, log: Log) -> Iterator[Table]:
    """Tables; one that comes again replaces the one with its title."""
    if "programs" in config.part:
        yield from _program_tables(config, log)
    for world, model in product(config.world, config.model):
        setup = Setup(model, config.optimizer)
        yield from _tables(setup, world, config, log)
        for engine in config.engines if "profile" in config.part else ():
            log(f"{model}, {world} ranks, profile: {engine}")
            text = on_ranks(world, profile, engine, setup, config.steps)[0]
            yield Table(f"{engine} on {model}, rank 0 of {world}", (), (), tuple(text.split("\n")))
    if "host" in config.part:
        yield host_table([name for name in HOSTED if name in config.engines], config.steps, log)
    if "update" in config.part:
        names = [PLAIN, *(name for name in ("full_shard", "fsdp2") if name in config.engines)]
        yield update_table(names, config.steps, log)


def _program_tables(config: Config, log: Log) -> Iterator[Table]:
    """Every program for each number of ranks; one row more each time."""
    for world in config.world:
        rows: tuple[tuple[Cell, ...], ...] = ()
        for name in PROGRAMS:
            log(f"programs, {world} ranks, {config.rounds} rounds: {name}")
            rows += (program_row(name, config.optimizer, world, config.rounds),)
            yield Table(f"Programs, {world} ranks: each step ÷ DDP's", PROGRAM_COLUMNS, rows)


def _tables(setup: Setup, world: int, config: Config, log: Log) -> Iterator[Table]:
    """Every engine on one model, in the order of ``ENGINES``; with more numbers each time."""
    names = [name for name in ENGINES if name in {*config.engines, PLAIN}]
    remarks = [f"{name}: absent, {absent(name)}" for name in names if absent(name)]
    rows: dict[str, Row] = {name: {} for name in names if not absent(name)}
    title = f"{setup.model}, {world} ranks: {setup.task.summary}"
    apart = [name for name in rows if name.startswith("deepspeed")]
    together = [name for name in rows if name not in apart]

    def table() -> Table:
        shown = {name + "*" * (name in apart): row for name, row in rows.items()}
        return Table.of(title, COLUMNS, shown, remarks)

    for engines in [together, [PLAIN, *apart]] if "time" in config.part else ():
        if len(engines) > 1:
            log(f"{setup.model}, {world} ranks, {config.rounds} rounds: {', '.join(engines)}")
            timed = timed_rows(on_ranks(world, measure, setup, engines, config.rounds), setup)
            rows |= {
                name: timed[name] for name in engines if name not in together or engines == together
            }
            yield table()
    with torch.device("meta"):
        numel = sum(param.numel() for param in setup.task.build().parameters())
    for name in rows if "memory" in config.part else ():
        log(f"{setup.model}, {world} ranks, memory: {name}")
        peak, start, seconds = peak_memory(name, setup, world)
        held = peak - start
        rows[name] |= {"MiB peak": peak / MIB, "− start": held / MIB, "÷ 16 P": held / numel / 16}
        rows[name].setdefault("min ms", 1e3 * seconds)
        yield table()


def timed_rows(ranks: Sequence[Mapping[str, Measured]], setup: Setup) -> dict[str, Row]:
    """Times and bytes of each engine that the ranks of one group measured."""
    model = setup.new_model()
    least = {name: least_bytes(name, model, len(ranks)) for name in ranks[0]}
    return {name: {**times(name, ranks), **traffic(name, ranks, least[name])} for name in least}


def times(engine: str, ranks: Sequence[Mapping[str, Measured]]) -> Row:
    """Times from every rank's laps; a step lasts until its slowest rank is done."""
    laps, plain_laps = (
        slowest([rank[name].laps for rank in ranks], lambda lap: lap.whole)
        for name in (engine, PLAIN)
    )
    whole, plain = [lap.whole for lap in laps], [lap.whole for lap in plain_laps]
    low, middle, high = paired(whole, plain)
    return {
        "× plain": middle,
        "q1": low,
        "q3": high,
        "min ×": min(whole) / min(plain),
        "ms": 1e3 * median(whole),
        "min ms": 1e3 * min(whole),
        "compute": 1e3 * median(lap.compute for lap in laps),
        "update": 1e3 * median(lap.update for lap in laps),
    }


def traffic(engine: str, ranks: Sequence[Mapping[str, Measured]], least: int) -> Row:
    """Bytes and calls from every rank's counts: the largest."""
    sent = max(rank[engine].sent for rank in ranks)
    copied = max(rank[engine].copied - rank[PLAIN].copied for rank in ranks)
    return {
        "MB sent": sent / 1e6,
        "least": least / 1e6,
        "sent ÷": sent / least if least else None,
        "MB copied": copied / 1e6,
    }
