"""From what is asked to a report: which processes run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.crew import Crew
from benchmarks.machine import this_machine
from benchmarks.step.engines import ENGINES, PLAIN, Setup, absent
from benchmarks.step.host import HOSTED, host_time, update_time
from benchmarks.step.memory import peak_memory
from benchmarks.step.results import Report, Row, times_of, traffic_of
from benchmarks.step.rounds import observe
from benchmarks.step.traffic import least_bytes

__all__ = ["PARTS", "SHORT", "Wanted", "run"]

PARTS = ("time", "memory", "host", "update")


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        models: names in ``TASKS``.
        worlds: numbers of ranks.
        engines: names in ``ENGINES``; the plain step is always there.
        rounds: interleaved rounds of steps.
        optimizer: a name in ``OPTIMIZERS``.
        parts: of ``PARTS``.
        memory_steps: steps during which memory is watched.
        watched: engines whose memory is watched; all of ``engines`` if empty.
        host_steps: steps of the host and optimizer measurements.
        host_params: parameters in a unit.
    """

    models: tuple[str, ...] = ("decoder128", "decoder32")
    worlds: tuple[int, ...] = (2,)
    engines: tuple[str, ...] = tuple(ENGINES)
    rounds: int = 20
    optimizer: str = "adamw"
    parts: tuple[str, ...] = PARTS
    memory_steps: int = 4
    watched: tuple[str, ...] = ()
    host_steps: int = 30
    host_params: tuple[int, ...] = (1, 10, 40)


#: What ``make bench`` runs, in less than three minutes.
SHORT = Wanted(
    models=("decoder32",),
    rounds=6,
    memory_steps=2,
    watched=(PLAIN, "full_shard", "ddp", "fsdp2"),
    host_steps=10,
)


Say = Callable[[str], None]
Keep = Callable[[Report], None]


def run(wanted: Wanted, say: Say, keep: Keep) -> Report:
    """Measure.

    Args:
        wanted: what.
        say: hears what is done now.
        keep: is handed the report whenever there is more of it, so that a run which is ended
            half-way has not been for nothing.
    """
    report = Report(this_machine(), wanted.optimizer)
    whole_steps = {"time", "memory"} & set(wanted.parts)
    for world, model in product(wanted.worlds, wanted.models) if whole_steps else ():
        before = report.rows
        for rows in _rows(Setup(model, wanted.optimizer), world, wanted, say):
            report = replace(report, rows=(*before, *rows))
            keep(report)
    if "host" in wanted.parts:
        for name in [name for name in HOSTED if name in wanted.engines]:
            say(f"host time: {name}")
            hosts = host_time(name, wanted.host_params, wanted.host_steps)
            report = replace(report, hosts=(*report.hosts, *hosts))
            keep(report)
    if "update" in wanted.parts:
        for name in [name for name in (PLAIN, "full_shard", "fsdp2") if name in wanted.engines]:
            say(f"optimizers: {name}")
            updates = update_time(name, wanted.host_steps)
            report = replace(report, updates=(*report.updates, *updates))
            keep(report)
    return report


def _rows(setup: Setup, world: int, wanted: Wanted, say: Say) -> Iterator[list[Row]]:
    """Every engine on one model, in the order of ``ENGINES``; with more numbers each time."""
    reasons = {name: absent(name) for name in ENGINES if name in {*wanted.engines, PLAIN}}
    rows = {name: Row(setup.model, world, name, absent=reason) for name, reason in reasons.items()}
    there = [name for name, reason in reasons.items() if not reason]
    if "time" in wanted.parts:
        apart = [name for name in there if name.startswith("deepspeed")]
        crews = [[name for name in there if name not in apart]]
        for names in crews + [[PLAIN, *apart]] * bool(apart):
            say(f"{setup.model}, {world} ranks, {wanted.rounds} rounds: {', '.join(names)}")
            rows |= _timed(setup, world, names, wanted.rounds, rows)
            yield list(rows.values())
    if "memory" in wanted.parts:
        for name in [name for name in there if not wanted.watched or name in wanted.watched]:
            say(f"{setup.model}, {world} ranks, memory: {name}")
            memory = peak_memory(name, setup, world, wanted.memory_steps)
            rows[name] = replace(rows[name], memory=memory)
            yield list(rows.values())


def _timed(
    setup: Setup, world: int, names: Sequence[str], rounds: int, rows: dict[str, Row]
) -> dict[str, Row]:
    """The rows of one crew, with times and bytes."""
    with Crew(world, observe, setup, names, rounds) as crew:
        seen = crew.hear()
    model = setup.new_model()
    params = sum(param.nbytes for param in model.parameters())
    apart = any(name.startswith("deepspeed") for name in names)
    return {
        name: replace(
            rows[name],
            apart=apart,
            losses=tuple(seen[0][name].losses),
            times=times_of(name, seen),
            traffic=traffic_of(name, seen, least_bytes(name, model, world), params),
        )
        for name in names
        if not (apart and name == PLAIN)
    }
