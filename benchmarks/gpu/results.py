"""What a run says, as one frozen value that goes to JSON and back, and what it must reach.

Tables, plots and tests read this value; reading JSON back checks every field and type, so the
file's schema is this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from pydantic import TypeAdapter

from benchmarks.gpu.engines import RIVALS
from benchmarks.gpu.models import Shape
from benchmarks.gpu.peers import Link
from benchmarks.gpu.rounds import Alone, Lap
from benchmarks.machine import Machine

__all__ = ["Case", "Report", "Row", "Times", "Verdict", "read", "times_of", "verdicts", "write"]

SCHEMA = 1
MOST_TIME = 0.9  # of FSDP2's step
MOST_MEMORY = 0.8  # of FSDP2's peak
WHOLE_PARAMETERS = "parameters, whole"


@dataclass(frozen=True)
class Times:
    """Of one engine's steps.

    Attributes:
        ratio: median over rounds of this engine's lap ÷ its rival's in the same round; ``None``
            where there is no rival.
        low: the lower quartile of these quotients.
        high: the upper one.
        median: milliseconds, from an idle device to an idle device.
        least: milliseconds.
        device: milliseconds by the device's clock, median; ``None`` on the CPU.
        host: milliseconds until the host has asked for everything, median.
        rounds: how many.
        apart: in processes of their own, since all engines together need more memory than there
            is: then a round is less alike for all.
    """

    ratio: float | None
    low: float | None
    high: float | None
    median: float
    least: float
    device: float | None
    host: float
    rounds: int
    apart: bool


@dataclass(frozen=True)
class Row:
    """One engine on one model.

    Attributes:
        engine: a name in ``ENGINES``.
        alone: memory, copies and overlap; ``None`` where it failed or was not asked for.
        times: ``None`` likewise.
        error: the last line of what failed, ``""`` if nothing did.
    """

    engine: str
    alone: Alone | None = None
    times: Times | None = None
    error: str = ""


@dataclass(frozen=True)
class Case:
    """One model at one world size.

    Attributes:
        model: a name in ``SHAPES``.
        shape: that shape, with the layers and tokens that were asked for.
        world: ranks, of which one is here.
        link: how long collectives take: assumed, not measured.
        rows: engine by engine.
    """

    model: str
    shape: Shape
    world: int
    link: Link
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        machine: where.
        device: the name and memory of the device.
        allocator: what ``PYTORCH_CUDA_ALLOC_CONF`` says, ``""`` for torch's default.
        wire: how gradients travel.
        optimizer: of ours; the rival's is torch's fused one.
        cases: model by model.
        schema: the version of this format.
    """

    machine: Machine
    device: str
    allocator: str
    wire: str
    optimizer: str
    cases: tuple[Case, ...] = ()
    schema: int = SCHEMA


ADAPTER = TypeAdapter(Report)


def write(report: Report, path: Path) -> None:
    """As JSON."""
    path.write_bytes(ADAPTER.dump_json(report, indent=2) + b"\n")


def read(path: Path) -> Report:
    """From JSON.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    text = path.read_bytes()
    report = ADAPTER.validate_json(text, strict=True)
    if ADAPTER.dump_python(report, mode="json") != json.loads(text):
        raise ValueError(f"{path} has fields that a report of schema {SCHEMA} has not")
    return report


# ---- from laps to times --------------------------------------------------------------------


def times_of(mine: Sequence[Lap], rival: Sequence[Lap] | None, apart: bool) -> Times:
    """From laps in the order of rounds. ``rival``: of as many rounds, or ``None``."""
    low = middle = high = None
    if rival is not None:
        quotients = [lap.whole / other.whole for lap, other in zip(mine, rival, strict=True)]
        low, middle, high = quantiles(quotients, n=4, method="inclusive")
    clocked = [lap.device for lap in mine if lap.device is not None]
    return Times(
        ratio=middle,
        low=low,
        high=high,
        median=1e3 * median(lap.whole for lap in mine),
        least=1e3 * min(lap.whole for lap in mine),
        device=1e3 * median(clocked) if clocked else None,
        host=1e3 * median(lap.host for lap in mine),
        rounds=len(mine),
        apart=apart,
    )


# ---- what was to be reached ----------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One of ours beside its rival; each quotient is ``None`` where a number is missing.

    Attributes:
        engine: ours.
        rival: whose numbers it is held against.
        time: step ÷ the rival's step.
        memory: peak ÷ the rival's peak.
        whole_copies: copies of parameters beyond the own slice, per step.
    """

    engine: str
    rival: str
    time: float | None
    memory: float | None
    whole_copies: float | None

    @property
    def missed(self) -> list[str]:
        """The targets that were not reached, in words; missing numbers reach nothing."""
        said = []
        if self.time is None or self.time > MOST_TIME:
            said.append(f"step {_shown(self.time)} × {self.rival}'s, at most {MOST_TIME} wanted")
        if self.memory is None or self.memory > MOST_MEMORY:
            wanted = f"at most {MOST_MEMORY} wanted"
            said.append(f"peak memory {_shown(self.memory)} × {self.rival}'s, {wanted}")
        if self.whole_copies is None or self.whole_copies > 0:
            count = "an unknown number of" if self.whole_copies is None else self.whole_copies
            said.append(f"{count} parameter copies beyond the own slice, 0 wanted")
        return said


def _shown(quotient: float | None) -> str:
    return "unknown" if quotient is None else f"{quotient:.3f}"


def verdicts(case: Case) -> list[Verdict]:
    """For each of ours that was run."""
    rows = {row.engine: row for row in case.rows}
    return [
        _verdict(rows[ours], rows.get(rival, Row(rival)))
        for ours, rival in RIVALS.items()
        if ours in rows
    ]


def _verdict(ours: Row, rival: Row) -> Verdict:
    memory = None
    if ours.alone is not None and rival.alone is not None:
        memory = ours.alone.memory.peak / rival.alone.memory.peak
    return Verdict(
        ours.engine,
        rival.engine,
        time=ours.times.ratio if ours.times is not None else None,
        memory=memory,
        whole_copies=None if ours.alone is None else _whole(ours.alone),
    )


def _whole(alone: Alone) -> float:
    counts: Iterable[float] = (
        max(count.kernels, count.calls) for count in alone.copies if count.side == WHOLE_PARAMETERS
    )
    return sum(counts)
