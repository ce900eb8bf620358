"""What a run measures, as one frozen value, and what it must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.engines import RIVALS
from benchmarks.gpu.measure import Alone, Lap
from benchmarks.gpu.models import Shape
from benchmarks.gpu.simulated import Link
from benchmarks.harness.machine import Machine
from benchmarks.harness.rounds import paired

MOST_TIME = 0.9  # of FSDP2's step
MOST_MEMORY = 0.8  # of FSDP2's peak
WHOLE_PARAMETERS = "parameters, whole"


@dataclass(frozen=True)
class Times:
    """Of one engine's steps."""

    # median over rounds of this engine's lap ÷ its rival's in the same round; ``None`` where there
    # is no rival
    ratio: float | None
    low: float | None  # the lower quartile of these quotients
    high: float | None  # the upper one
    median: float  # milliseconds, from an idle device to an idle device
    least: float  # milliseconds
    device: float | None  # milliseconds by the device's clock, median; ``None`` on the CPU
    host: float  # milliseconds until the host has asked for everything, median
    rounds: int  # how many
    # in processes of their own, since all engines together need more memory than there is: then a
    # round is less alike for all
    apart: bool


@dataclass(frozen=True)
class Row:
    """One engine on one model."""

    engine: str  # a name in ``ENGINES``
    # memory, copies and overlap; ``None`` where it failed or was not asked for
    alone: Alone | None = None
    times: Times | None = None  # ``None`` likewise
    error: str = ""  # the last line of what failed, ``""`` if nothing did


@dataclass(frozen=True)
class Case:
    """One model at one world size."""

    model: str  # a name in ``SHAPES``
    shape: Shape  # that shape, with the layers and tokens that were asked for
    world: int  # ranks, of which one is here
    link: Link  # how long collectives take: assumed, not measured
    rows: tuple[Row, ...] = ()  # engine by engine


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine  # where
    device: str  # the name and memory of the device
    allocator: str  # what ``PYTORCH_CUDA_ALLOC_CONF`` says, ``""`` for torch's default
    wire: str  # how gradients travel
    optimizer: str  # of ours; the rival's is torch's fused one
    cases: tuple[Case, ...] = ()  # model by model
    schema: int = 1  # the version of this format


def times_of(mine: Sequence[Lap], rival: Sequence[Lap] | None, apart: bool) -> Times:
    """From laps in the order of rounds. ``rival``: of as many rounds, or ``None``."""
    low = middle = high = None
    if rival is not None:
        low, middle, high = paired([lap.whole for lap in mine], [lap.whole for lap in rival])
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
    """One of ours beside its rival; each quotient is ``None`` where a number is missing."""

    engine: str  # ours
    rival: str  # whose numbers it is held against
    time: float | None  # step ÷ the rival's step
    memory: float | None  # peak ÷ the rival's peak
    whole_copies: float | None  # copies of parameters beyond the own slice, per step

    @property
    def missed(self) -> list[str]:
        """The targets that were not reached, in words; missing numbers reach nothing."""
        text = []
        for what, quotient, most in (
            ("step", self.time, MOST_TIME),
            ("peak memory", self.memory, MOST_MEMORY),
        ):
            if quotient is None or quotient > most:
                shown = "unknown" if quotient is None else f"{quotient:.3f}"
                text.append(f"{what} {shown} × {self.rival}'s, at most {most} wanted")
        if self.whole_copies is None or self.whole_copies > 0:
            count = "an unknown number of" if self.whole_copies is None else self.whole_copies
            text.append(f"{count} parameter copies beyond the own slice, 0 wanted")
        return text


def verdicts(case: Case) -> list[Verdict]:
    """For each of ours that was run."""
    rows = {row.engine: row for row in case.rows}
    return [
        _verdict(rows[ours], rows.get(rival, Row(rival)))
        for ours, rival in RIVALS.items()
        if ours in rows
    ]


def _verdict(ours: Row, rival: Row) -> Verdict:
    memory = whole = None
    if ours.alone is not None:
        copies = [count for count in ours.alone.copies if count.side == WHOLE_PARAMETERS]
        whole = sum(max(count.kernels, count.calls) for count in copies)
        if rival.alone is not None:
            memory = ours.alone.memory.peak / rival.alone.memory.peak
    time = ours.times.ratio if ours.times is not None else None
    return Verdict(ours.engine, rival.engine, time, memory, whole)
