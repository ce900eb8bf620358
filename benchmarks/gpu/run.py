"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.crew import Crew
from benchmarks.gpu.engines import ENGINES, RIVALS, Setup
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.peers import link_of
from benchmarks.gpu.results import Case, Report, Row, times_of
from benchmarks.gpu.rounds import Alone, Lap, look, race
from benchmarks.machine import this_machine

__all__ = ["PARTS", "Wanted", "fits", "run", "unavailable"]

PARTS = ("alone", "time")
VISITS = 4  # of each process, where engines cannot share one
FULL = 0.8  # of the device's memory, at most, for engines that share a process

Say = Callable[[str], None]
Keep = Callable[[Report], None]


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        models: names in ``SHAPES``.
        worlds: numbers of ranks.
        engines: names in ``ENGINES``.
        rounds: of laps.
        layers: instead of each shape's own.
        tokens: likewise.
        bandwidth: bytes per second, instead of what ``link_of`` assumes; 0: no time at all.
        wire: how gradients travel: a name in ``WIRES``.
        optimizer: of ours: one of ``OPTIMIZERS``.
        device: ``"cuda"`` or ``"cpu"``.
        parts: of ``PARTS``.
    """

    models: tuple[str, ...] = ("blocks8b", "small125m")
    worlds: tuple[int, ...] = (8, 64)
    engines: tuple[str, ...] = tuple(ENGINES)
    rounds: int = 20
    layers: int | None = None
    tokens: int | None = None
    bandwidth: float | None = None
    wire: str = "own"
    optimizer: str = "torch"
    device: str = "cuda"
    parts: tuple[str, ...] = PARTS

    def setup(self, model: str, world: int) -> Setup:
        """Of one case."""
        asked = {"layers": self.layers, "tokens": self.tokens}
        changes = {name: value for name, value in asked.items() if value is not None}
        shape = replace(SHAPES[model], **changes)
        link = link_of(world, self.bandwidth)
        return Setup(model, shape, world, self.device, link, self.wire, self.optimizer)


def unavailable(device: str) -> str:
    """Why nothing can be measured on ``device``, and what to do; ``""`` if it can."""
    if device == "cpu" or torch.cuda.is_available():
        return ""
    return (
        f"there is no CUDA device here (torch {torch.__version__}), so nothing was measured. Run "
        "the same command on a machine with one GPU and a torch built for CUDA. Here, "
        "`python -m benchmarks gpu --device cpu --model tiny` tries the benchmark itself: its "
        "times mean nothing."
    )


def run(wanted: Wanted, say: Say, keep: Keep) -> Report:
    """Measure.

    Args:
        wanted: what.
        say: hears what is done now.
        keep: is handed the report whenever there is more of it, so that a run which is ended
            half-way has not been for nothing.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says that it begins
    name, _ = _device(wanted.device)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    report = Report(this_machine(), name, allocator, wanted.wire, wanted.optimizer)
    for world, model in product(wanted.worlds, wanted.models):
        before = report.cases
        for case in _case(wanted.setup(model, world), wanted, say):
            report = replace(report, cases=(*before, case))
            keep(report)
    return report


def _device(device: str) -> tuple[str, int]:
    """Its name, and bytes of memory."""
    if device == "cpu":
        return "CPU: times mean nothing", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB", found.total_memory


def _case(setup: Setup, wanted: Wanted, say: Say) -> Iterator[Case]:
    """One model at one world size, with more numbers each time."""
    rows = {name: Row(name) for name in ENGINES if name in wanted.engines}
    here = f"{setup.model}, world {setup.world}"
    case = Case(setup.model, setup.shape, setup.world, setup.link)
    for name in rows if "alone" in wanted.parts else ():
        say(f"{here}: memory, copies and timeline of {name}")
        rows[name] = _looked(setup, rows[name], say)
        yield replace(case, rows=tuple(rows.values()))
    names = [name for name, row in rows.items() if not row.error]
    if "time" in wanted.parts and names:
        apart = not fits([row.alone for row in rows.values()], _device(setup.device)[1])
        say(f"{here}: {wanted.rounds} rounds, {'apart' if apart else 'together'}")
        rows |= _raced(setup, {name: rows[name] for name in names}, wanted.rounds, apart, say)
        yield replace(case, rows=tuple(rows.values()))


def fits(seen: Sequence[Alone | None], total: int) -> bool:
    """Can all engines be in one process: what each keeps, and what one of them needs besides?

    Unknown numbers fit: where memory was not looked at, nobody asked for care.
    """
    memories = [alone.memory for alone in seen if alone is not None]
    kept = sum(memory.rest for memory in memories)
    beyond = max((memory.peak - memory.rest for memory in memories), default=0)
    return kept + beyond <= FULL * total


def _looked(setup: Setup, row: Row, say: Say) -> Row:
    try:
        with Crew(1, look, setup, row.engine) as crew:
            return replace(row, alone=crew.hear()[0])
    except RuntimeError as error:  # the others go on: a lent device does not come back
        say(str(error))
        return replace(row, error=_why(error))


def _why(error: RuntimeError) -> str:
    """What was raised, of a traceback: its last line that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() == line != ""]
    return lines[-1]


def _raced(
    setup: Setup, rows: Mapping[str, Row], rounds: int, apart: bool, say: Say
) -> dict[str, Row]:
    try:
        laps = _laps(setup, list(rows), rounds, apart)
    except RuntimeError as error:
        say(str(error))
        return {name: replace(row, error=_why(error)) for name, row in rows.items()}
    return {
        name: replace(row, times=times_of(laps[name], laps.get(RIVALS.get(name, "")), apart))
        for name, row in rows.items()
    }


def _laps(setup: Setup, names: Sequence[str], rounds: int, apart: bool) -> dict[str, list[Lap]]:
    """Of each engine, in the order of rounds."""
    if not apart:
        with Crew(1, race, setup, names, rounds) as crew:
            together: dict[str, list[Lap]] = crew.hear()[0]
            return together
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for _ in range(VISITS):
        for name in names:
            with Crew(1, race, setup, [name], -(-rounds // VISITS)) as crew:
                laps[name] += crew.hear()[0][name]
    return laps
