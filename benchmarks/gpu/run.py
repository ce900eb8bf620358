"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.gpu.engines import ENGINES, RIVALS, Setup
from benchmarks.gpu.measure import Alone, Lap, measure_alone, time_in_turn
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.report import Case, Report, Row, times_of
from benchmarks.gpu.simulated import link_of
from benchmarks.harness.machine import this_machine
from benchmarks.harness.workers import Workers

PARTS = ("alone", "time")
VISITS = 4  # of each process, where engines cannot share one
FULL = 0.8  # of the device's memory, at most, for engines that share a process

Log = Callable[[str], None]
Save = Callable[[Report], None]


@dataclass(frozen=True)
class Config:
    """What to measure."""

    models: tuple[str, ...] = ("blocks8b", "small125m")  # names in ``SHAPES``
    worlds: tuple[int, ...] = (8, 64)  # numbers of ranks
    engines: tuple[str, ...] = tuple(ENGINES)  # names in ``ENGINES``
    rounds: int = 20  # of laps
    layers: int | None = None  # instead of each shape's own
    tokens: int | None = None  # likewise
    # bytes per second, instead of what ``link_of`` assumes; 0: no time at all
    bandwidth: float | None = None
    wire: str = "own"  # how gradients travel: a name in ``WIRES``
    optimizer: str = "torch"  # of ours: one of ``OPTIMIZERS``
    device: str = "cuda"  # ``"cuda"`` or ``"cpu"``
    parts: tuple[str, ...] = PARTS  # of ``PARTS``

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


def run(config: Config, log: Log, save: Save) -> Report:
    """Measure; ``save`` is called with the report whenever there is more of it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says that it begins
    name, _ = _device(config.device)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    report = Report(this_machine(), name, allocator, config.wire, config.optimizer)
    for world, model in product(config.worlds, config.models):
        before = report.cases
        for case in _case(config.setup(model, world), config, log):
            report = replace(report, cases=(*before, case))
            save(report)
    return report


def _device(device: str) -> tuple[str, int]:
    """Its name, and bytes of memory."""
    if device == "cpu":
        return "CPU: times mean nothing", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = torch.cuda.get_device_properties(0)
    nbytes = properties.total_memory
    return f"{properties.name}, {nbytes / 2**30:.0f} GiB", nbytes


def _case(setup: Setup, config: Config, log: Log) -> Iterator[Case]:
    """One model at one world size, with more numbers each time."""
    rows = {name: Row(name) for name in ENGINES if name in config.engines}
    here = f"{setup.model}, world {setup.world}"
    case = Case(setup.model, setup.shape, setup.world, setup.link)
    for name in rows if "alone" in config.parts else ():
        log(f"{here}: memory, copies and timeline of {name}")
        rows[name] = _measured(setup, rows[name], log)
        yield replace(case, rows=tuple(rows.values()))
    names = [name for name, row in rows.items() if not row.error]
    if "time" in config.parts and names:
        apart = not fits([row.alone for row in rows.values()], _device(setup.device)[1])
        log(f"{here}: {config.rounds} rounds, {'apart' if apart else 'together'}")
        rows |= _timed(setup, {name: rows[name] for name in names}, config.rounds, apart, log)
        yield replace(case, rows=tuple(rows.values()))


def fits(rows: Sequence[Alone | None], total: int) -> bool:
    """Can all engines be in one process: what each keeps, and what one of them needs besides?

    Unknown numbers fit: where memory was not looked at, nobody asked for care.
    """
    memories = [alone.memory for alone in rows if alone is not None]
    kept = sum(memory.rest for memory in memories)
    beyond = max((memory.peak - memory.rest for memory in memories), default=0)
    return kept + beyond <= FULL * total


def _measured(setup: Setup, row: Row, log: Log) -> Row:
    try:
        with Workers(1, measure_alone, setup, row.engine) as workers:
            return replace(row, alone=workers.receive()[0])
    except RuntimeError as error:  # the others go on: a lent device does not come back
        log(str(error))
        return replace(row, error=_why(error))


def _why(error: RuntimeError) -> str:
    """What was raised, of a traceback: its last line that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() == line != ""]
    return lines[-1]


def _timed(
    setup: Setup, rows: Mapping[str, Row], rounds: int, apart: bool, log: Log
) -> dict[str, Row]:
    try:
        laps = _laps(setup, list(rows), rounds, apart)
    except RuntimeError as error:
        log(str(error))
        return {name: replace(row, error=_why(error)) for name, row in rows.items()}
    return {
        name: replace(row, times=times_of(laps[name], laps.get(RIVALS.get(name, "")), apart))
        for name, row in rows.items()
    }


def _laps(setup: Setup, names: Sequence[str], rounds: int, apart: bool) -> dict[str, list[Lap]]:
    """Of each engine, in the order of rounds."""
    if not apart:
        with Workers(1, time_in_turn, setup, names, rounds) as workers:
            together: dict[str, list[Lap]] = workers.receive()[0]
            return together
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for _ in range(VISITS):
        for name in names:
            with Workers(1, time_in_turn, setup, [name], -(-rounds // VISITS)) as workers:
                laps[name] += workers.receive()[0][name]
    return laps
