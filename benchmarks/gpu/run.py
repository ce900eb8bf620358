"""Which processes run, one after the other, and the tables that come of what they measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

import click
import torch

from benchmarks.gpu.engines import ENGINES, OPTIMIZERS, RIVALS, WIRES, Setup
from benchmarks.gpu.measure import Alone, Lap, measure_alone, time_in_turn
from benchmarks.gpu.simulated import link_of
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Cell, Column, Report, Row, Table, verdict
from benchmarks.harness.rounds import paired
from benchmarks.harness.workers import on_ranks
from benchmarks.models import ON_GPU

PARTS = ("alone", "time")
WHOLE = "parameters, whole"  # copies of more than the own slice
STEP = (
    Column("engine"), Column("step ÷", ".3f", drawn=True, target=0.9), Column("q1", ".2f"),
    Column("q3", ".2f"), Column("ms", ",.2f"), Column("min ms", ",.2f"), Column("host", ",.2f"),
    Column("peak ÷", ".3f", drawn=True, target=0.8), Column("MiB rest", ",.1f"),
    Column("MiB peak", ",.1f"), Column("reserved", ",.1f"),
    Column("whole copies", ".0f", target=0), Column("collectives ms", ".2f"),
    Column("hidden", ".0%"), Column("exposed ms", ".2f"), Column("MB received", ",.2f"),
)  # fmt: skip
COPIES = (
    Column("engine"), Column("copies of"), Column("copies", ".0f"), Column("MB written", ",.2f"),
)  # fmt: skip
NOTES = """
÷            full_shard ÷ fsdp2 and shard_grad_op ÷ fsdp2_keep: steps in the same round, with their
             quartiles q1 and q3, and peaks of memory
ms           of a step, from an idle device to an idle one; host: until the host has asked for all
MiB          rest: between steps; peak: the most in use; reserved: the most taken from the device
whole copies of parameters, per step, of more than one rank's part of the largest unit
exposed      by how much a step is longer than over a link that takes no time
hidden       of the collectives' time, what is not exposed: it lies beside computation
copies of    own slice: no more than one rank's part of the largest unit; whole: more than that
plain        whole, bf16, no communication and no optimizer: for scale only
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    world: tuple[int, ...] = setting((8, 64), "numbers of ranks")
    model: tuple[str, ...] = setting(("blocks8b", "small125m"), "what is trained", ON_GPU)
    engines: tuple[str, ...] = setting(tuple(ENGINES), "which", ENGINES)
    rounds: int = setting(20, "interleaved rounds of laps", least=2)
    bandwidth: float | None = setting(None, "GB/s of the link, as assumed; 0: takes no time")
    wire: str = setting("own", "how gradients travel", WIRES)
    optimizer: str = setting("torch", "of ours", OPTIMIZERS)
    device: str = setting("cuda", "cpu tries the benchmark", ("cuda", "cpu"))
    part: tuple[str, ...] = setting(PARTS, "what is measured", PARTS)
    simulated: bool = setting(
        False, "count on a recorded device that is not there, and time nothing"
    )

    def setup(self, model: str, world: int) -> Setup:
        """The setup of one case."""
        link = link_of(world, None if self.bandwidth is None else 1e9 * self.bandwidth)
        return Setup(model, world, self.device, link, self.wire, self.optimizer)


def run(config: Config, log: Log) -> Iterator[Report]:
    """One rank of many on one CUDA device, with simulated peers, beside FSDP2."""
    if config.simulated:
        from benchmarks.gpu import recorded

        yield from recorded.run(log)
        return
    if config.device != "cpu" and not torch.cuda.is_available():
        raise click.ClickException(
            f"there is no CUDA device here (torch {torch.__version__}), so nothing was measured. "
            "Run the same command on a machine with one GPU and a torch built for CUDA. Here, "
            "`python -m benchmarks gpu --device cpu --model tiny` tries the benchmark itself: its "
            "times mean nothing."
        )
    report = Report(this_machine(), settings(config), notes=tuple(NOTES))
    for world, model in product(config.world, config.model):
        case = Case(config.setup(model, world), config, log)
        before = report.tables
        for tables in case.measured():
            report = replace(report, tables=(*before, *tables))
            yield report


def settings(config: Config) -> tuple[str, ...]:
    """The device, and what is the same for all engines."""
    device = "CPU: times mean nothing"
    if config.device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") or "torch's default"
    optimizer = "torch.optim.AdamW(fused=True)"
    if config.optimizer == "flat":
        optimizer = f"ours: sw.optim.AdamW, others: {optimizer}"
    return (
        f"{device}; allocator: {allocator}",
        f"bf16 compute on fp32 shards, {optimizer}, gradients travel: {config.wire}",
    )


@dataclass
class Case:
    """One model at one world size, as far as it is measured."""

    setup: Setup
    config: Config
    log: Log
    rows: dict[str, Row] = field(default_factory=dict)  # engine → column → number
    copies: list[tuple[Cell, ...]] = field(default_factory=list)  # of ``COPIES``
    errors: dict[str, str] = field(default_factory=dict)  # engine → the last line of what failed

    def measured(self) -> Iterator[tuple[Table, ...]]:
        """Its tables, with more numbers each time."""
        case, config = f"{self.setup.model}, world {self.setup.world}", self.config
        self.rows = {name: {} for name in ENGINES if name in config.engines}
        for name in self.rows if "alone" in config.part else ():
            self.log(f"{case}: memory and copies of {name}")
            alone = self._tried([name], measure_alone, name)
            if alone is not None:
                self.rows[name] |= alone_row(alone)
                of_sides = alone.copies.items()
                self.copies += [(name, side, n, size / 1e6) for side, (n, size) in of_sides]
            yield self.tables()
        names = [name for name in self.rows if name not in self.errors]
        if "time" in config.part and names:
            self.log(f"{case}: {config.rounds} rounds")
            laps = self._tried(names, time_in_turn, names, config.rounds) or {}
            for name, mine in laps.items():
                self.rows[name] |= times_row(mine, laps.get(RIVALS.get(name, "")))
            yield self.tables()

    def _tried(self, names: Sequence[str], measure: Callable[..., None], *args: Any) -> Any:
        """What ``measure`` sends, ``None`` if it fails: a lent device does not come back."""
        try:
            return on_ranks(1, measure, self.setup, *args)[0]
        except RuntimeError as error:
            self.log(str(error))
            lines = [line for line in str(error).splitlines() if line.strip() == line != ""]
            self.errors |= dict.fromkeys(names, lines[-1])  # what was raised, of a traceback
            return None

    def tables(self) -> tuple[Table, ...]:
        """The tables as they are now."""
        setup = self.setup
        compare(self.rows)
        speed = (
            f"{setup.link.bandwidth / 1e9:.0f} GB/s and {setup.link.latency * 1e6:.0f} µs assumed"
            if setup.link.bandwidth
            else "collectives take no time"
        )
        title = f"{setup.model}, rank 0 of {setup.world}, {speed}: {setup.task.summary}"
        verdicts = [verdict(name, self.rows[name], STEP) for name in RIVALS if name in self.rows]
        failed = [f"{name}: failed, {why}" for name, why in self.errors.items()]
        step = Table.of(title, STEP, self.rows, [*verdicts, *failed])
        return step, Table("", COPIES, tuple(self.copies))


# ---- from what was measured to rows ---------------------------------------------------------


def alone_row(alone: Alone) -> Row:
    """Memory and copies of one engine."""
    row: Row = {
        "whole copies": alone.copies.get(WHOLE, (0.0, 0.0))[0],
        "MB received": alone.received / 1e6,
    }
    if alone.memory is not None:
        row |= {"MiB rest": alone.memory.rest / MIB, "MiB peak": alone.memory.peak / MIB}
        row |= {"reserved": alone.memory.reserved / MIB}
    return row


def times_row(mine: Sequence[Lap], rival: Sequence[Lap] | None) -> Row:
    """A row from laps in the order of rounds. ``rival``: of as many rounds, or ``None``."""
    row: Row = {
        "ms": 1e3 * median(lap.whole for lap in mine),
        "min ms": 1e3 * min(lap.whole for lap in mine),
        "host": 1e3 * median(lap.host for lap in mine),
    }
    if any(lap.link for lap in mine):
        link, exposed = median(lap.link for lap in mine), median(lap.exposed for lap in mine)
        row |= {"collectives ms": 1e3 * link, "exposed ms": 1e3 * exposed}
        row["hidden"] = 1 - exposed / link
    if rival is not None:
        low, middle, high = paired([lap.whole for lap in mine], [lap.whole for lap in rival])
        row |= {"step ÷": middle, "q1": low, "q3": high}
    return row


def compare(rows: Mapping[str, Row]) -> None:
    """Add each of our peaks of memory ÷ its rival's."""
    for ours, rival in RIVALS.items():
        mine, other = (rows.get(name, {}).get("MiB peak") for name in (ours, rival))
        if isinstance(mine, float) and isinstance(other, float):
            rows[ours]["peak ÷"] = mine / other
