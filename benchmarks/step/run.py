"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.harness.machine import this_machine
from benchmarks.harness.workers import Workers
from benchmarks.step.engines import ENGINES, PLAIN, Setup, absent
from benchmarks.step.host import HOSTED, host_time, update_time
from benchmarks.step.measure import measure
from benchmarks.step.memory import peak_memory
from benchmarks.step.report import Report, Row, times_of, traffic_of
from benchmarks.step.traffic import least_bytes

PARTS = ("time", "memory", "host", "update")


@dataclass(frozen=True)
class Config:
    """What to measure."""

    models: tuple[str, ...] = ("decoder128", "decoder32")  # names in ``TASKS``
    worlds: tuple[int, ...] = (2,)  # numbers of ranks
    # names in ``ENGINES``; the plain step is always there
    engines: tuple[str, ...] = tuple(ENGINES)
    rounds: int = 20  # interleaved rounds of steps
    optimizer: str = "adamw"  # a name in ``OPTIMIZERS``
    parts: tuple[str, ...] = PARTS  # of ``PARTS``
    memory_steps: int = 4  # steps during which memory is watched
    watched: tuple[str, ...] = ()  # engines whose memory is watched; all of ``engines`` if empty
    host_steps: int = 30  # steps of the host and optimizer measurements
    host_params: tuple[int, ...] = (1, 10, 40)  # parameters in a unit


#: What ``make bench`` runs, in less than three minutes.
SHORT = Config(
    models=("decoder32",),
    rounds=6,
    memory_steps=2,
    watched=(PLAIN, "full_shard", "ddp", "fsdp2"),
    host_steps=10,
)


Log = Callable[[str], None]
Save = Callable[[Report], None]


def run(config: Config, log: Log, save: Save) -> Report:
    """Measure; ``save`` is called with the report whenever there is more of it."""
    report = Report(this_machine(), config.optimizer)
    whole_steps = {"time", "memory"} & set(config.parts)
    for world, model in product(config.worlds, config.models) if whole_steps else ():
        before = report.rows
        for rows in _rows(Setup(model, config.optimizer), world, config, log):
            report = replace(report, rows=(*before, *rows))
            save(report)
    if "host" in config.parts:
        for name in [name for name in HOSTED if name in config.engines]:
            log(f"host time: {name}")
            hosts = host_time(name, config.host_params, config.host_steps)
            report = replace(report, hosts=(*report.hosts, *hosts))
            save(report)
    if "update" in config.parts:
        for name in [name for name in (PLAIN, "full_shard", "fsdp2") if name in config.engines]:
            log(f"optimizers: {name}")
            updates = update_time(name, config.host_steps)
            report = replace(report, updates=(*report.updates, *updates))
            save(report)
    return report


def _rows(setup: Setup, world: int, config: Config, log: Log) -> Iterator[list[Row]]:
    """Every engine on one model, in the order of ``ENGINES``; with more numbers each time."""
    reasons = {name: absent(name) for name in ENGINES if name in {*config.engines, PLAIN}}
    rows = {name: Row(setup.model, world, name, absent=reason) for name, reason in reasons.items()}
    present = [name for name, reason in reasons.items() if not reason]
    if "time" in config.parts:
        apart = [name for name in present if name.startswith("deepspeed")]
        together = [name for name in present if name not in apart]
        for names in [together] + [[PLAIN, *apart]] * bool(apart):
            log(f"{setup.model}, {world} ranks, {config.rounds} rounds: {', '.join(names)}")
            rows |= _timed(setup, world, names, config.rounds, rows)
            yield list(rows.values())
    if "memory" in config.parts:
        for name in [name for name in present if not config.watched or name in config.watched]:
            log(f"{setup.model}, {world} ranks, memory: {name}")
            memory = peak_memory(name, setup, world, config.memory_steps)
            rows[name] = replace(rows[name], memory=memory)
            yield list(rows.values())


def _timed(
    setup: Setup, world: int, names: Sequence[str], rounds: int, rows: dict[str, Row]
) -> dict[str, Row]:
    """The rows of one set of processes, with times and bytes."""
    with Workers(world, measure, setup, names, rounds) as workers:
        measured = workers.receive()
    model = setup.new_model()
    params = sum(param.nbytes for param in model.parameters())
    apart = any(name.startswith("deepspeed") for name in names)
    return {
        name: replace(
            rows[name],
            apart=apart,
            losses=tuple(measured[0][name].losses),
            times=times_of(name, measured),
            traffic=traffic_of(name, measured, least_bytes(name, model, world), params),
        )
        for name in names
        if not (apart and name == PLAIN)
    }
