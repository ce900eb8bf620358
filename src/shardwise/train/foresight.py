"""The plan of a run, asked before its first step, and what the run took beside it.

recipe ─▶ question ─▶ plan ──────────────┐ memory and events of a step, tokens/s, MFU
run    ─▶ one recorded step, tokens/s ───┴─▶ both, and the term that is off
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.collectives import broadcast_object
from shardwise.comm.machine.environment import local_size
from shardwise.doctor.machine import device_name
from shardwise.errors import ConfigError
from shardwise.launch.machine_memory import machine_memory
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.forecast.machine import Machine, known
from shardwise.plan.forecast.memory import MOMENTUM, MemoryForecast, Moment
from shardwise.plan.forecast.planner import Planner
from shardwise.plan.forecast.time import TimeForecast
from shardwise.plan.printed import size
from shardwise.plan.schedule.events import Event, Phase
from shardwise.train.comparison import Compared
from shardwise.train.data import Data
from shardwise.train.job import Job
from shardwise.train.memory_estimate import memory_of
from shardwise.train.question import chosen_by, model_of, question_of, with_loss_in_head
from shardwise.train.records import Warned
from shardwise.train.run_logger import RunLogger

HERE = "here"  # the name of a machine that `shardwise plan --calibrate` measured
OFF = 0.10  # a difference that is explained
OF_ENGINE = (Kind.GATHERED, Kind.PARAMETERS, Kind.JOINED, Kind.BUCKETS, Kind.GRADIENTS)


@dataclass(frozen=True)
class Foresight:
    """A plan that is asked for.

    Attributes:
        force: train, though it does not fit.
        machines: the file with this machine's entry; ``None``: of an accelerator, its name's.
    """

    force: bool = False
    machines: Path | None = None


USUAL = Foresight()


class Here(NamedTuple):
    """The machine that this process computes on; ``timed``: is its speed known?"""

    machine: Machine
    timed: bool


def machine_here(
    device: torch.device, memory: float, machines: Path | None, ranks: int | None = None
) -> Here:
    """The machine of ``device``, which has ``memory`` bytes, with ``ranks`` on each host.

    Raises:
        ConfigError: the file has no entry for it.
    """
    ranks = ranks or local_size(os.environ) or 1
    if machines is not None:
        return Here(known().with_file(machines).machine(HERE, ranks), timed=True)
    name = device_name(device).removeprefix("NVIDIA ").removeprefix("AMD Instinct ")
    try:
        return Here(known().machine(name, ranks), timed=True)
    except ConfigError:  # its memory can be planned all the same
        usual = known().machine("H100", ranks)
        own: dict[str, Any] = {"name": name, "device": device.type, "memory": memory, "reserved": 0}
        return Here(replace(usual, accelerator=replace(usual.accelerator, **own)), timed=False)


class Planned(NamedTuple):
    """An event of a step, with bytes of the engine and of all on the device after it.

    Of the engine without memory to receive in, which a recording counts to others.
    """

    event: Event
    engine: int
    whole: int


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        memory: of the micro-batch that takes most.
        time: of a step; ``None``: the machine's speed is not known.
        whole, engine: memory of each kind of micro-batch, and that without activations.
        times: how many of each kind a step has.
        here: where.
    """

    memory: MemoryForecast
    time: TimeForecast | None
    whole: Sequence[MemoryForecast]
    engine: Sequence[MemoryForecast]
    times: Sequence[int]
    ranks: int
    here: Here

    @cached_property
    def events(self) -> tuple[Planned, ...]:
        """All events of a step, in order."""
        return tuple(
            Planned(
                own.event,
                own.alive - own.received + self._host(own),
                every.alive + self._host(every),
            )
            for engine, whole, times in zip(self.engine, self.whole, self.times, strict=True)
            for own, every in [*zip(engine.moments, whole.moments, strict=True)] * times
            if own.event is not None
        )

    @property
    def on_cpu(self) -> bool:
        """Is host memory the device's own?"""
        return self.here.machine.accelerator.device == "cpu"

    def _host(self, moment: Moment) -> int:
        return self.here.machine.accelerator.within(moment.in_host)

    @property
    def rate(self) -> float | None:
        """Tokens per second over all ranks."""
        return None if self.time is None else self.time.tokens_per_second * self.ranks

    @property
    def peak(self) -> int:
        """Bytes of tensors at most on the device."""
        return self.memory.peak + self.here.machine.accelerator.within(self.memory.in_host)

    def beside(self, moments: Sequence[Sequence[Any]]) -> list[tuple[int | None, int | None]]:
        """Bytes of the engine and of all, as planned, at each moment of a recorded step.

        From the first event on that was not planned, none.
        """
        planned, rows = iter(self.events), list[tuple[int | None, int | None]]()
        for _, _, event in moments:
            if event is None:
                rows.append((None, None))
                continue
            expected = next(planned, None)
            if expected is None or expected.event[:3] != tuple(event[:3]):
                break
            rows.append((expected.engine, expected.whole))
        return rows + [(None, None)] * (len(moments) - len(rows))

    @property
    def most(self) -> dict[str, int]:
        """Bytes of each kind at most, as a recorded step has them."""
        kinds = {kind: max(each.most.get(kind, 0) for each in self.whole) for kind in Kind}
        kinds[Kind.PARAMETERS] += kinds.pop(Kind.JOINED)
        others = (Kind.ACTIVATIONS, Kind.COMMUNICATION, Kind.BUFFERS, Kind.BATCH)
        rest = sum(kinds.pop(kind) for kind in others)
        return {**{str(kind): nbytes for kind, nbytes in kinds.items()}, OTHERS: rest}


OTHERS = "activations and others"
"""Of a recorded step: bytes that the process has allocated since it began, beside the engine's."""


def plan_of(job: Job, vocabulary: int, options: Foresight, memory: float) -> RunPlan:
    """Plan ``job`` on paper: from its recipe, not from what was built.

    Args:
        memory: bytes of the device.
    """
    recipe, comm = job.recipe, job.sharded.comm
    here = machine_here(comm.device, memory, options.machines)
    chosen = chosen_by(recipe)
    # Over several hosts the ranks of each may share memory all the same.
    shared = comm.memory.shared or any(b.allocation.shared for b in job.sharded.buckets)

    def planner_of(all_logits: bool) -> Planner:
        question = question_of(recipe, model_of(recipe, vocabulary), here.machine, comm.size)
        before_exchanges = question.optimizer.removesuffix(MOMENTUM)  # as in the recorded step
        question = replace(question, shared=shared, optimizer=before_exchanges)
        return Planner(question if all_logits else with_loss_in_head(question))

    planner = planner_of(bool(job.all_logits))
    whole, engine = planner.memories(chosen), planner.memories(chosen, alone=True)
    most = max(whole, key=lambda each: each.peak)
    timed = planner_of(all_logits=True) if here.timed and not job.all_logits else planner
    time = timed.time(chosen) if here.timed else None
    times = [passes.times for passes in planner.question.passes(chosen)]
    return RunPlan(most, time, whole, engine, times, comm.size, here)


def refusal(plan: RunPlan, memory: float, host_memory: float) -> str:
    """The sentence by which a run is refused that cannot fit in so many bytes; ``""``: it can.

    Args:
        memory: of the device; on a CPU all ranks of a host share them.
        host_memory: of the host, which all of its ranks share.
    """
    own, of_host = plan.here.machine.accelerator, min(plan.here.machine.per_host, plan.ranks)
    kind, nbytes = next(iter(plan.memory.by_kind.items()))
    where, had = f"of which {kind} are {size(nbytes)}, and this {own.device}", memory
    ranks, each = of_host if plan.on_cpu else 1, plan.memory.held(own) + own.reserved
    if not plan.on_cpu and each <= memory:
        where, had = "in host memory, and this host", host_memory
        ranks, each = of_host, plan.memory.in_host
    if ranks * each <= had:
        return ""
    of = f"{size(each)} on each of {ranks:,} ranks" if ranks > 1 else "at its peak"
    return (
        f"a step is planned to take {size(ranks * each)}, {of}, {where} has {size(int(had))}, so "
        "it would be killed. `shardwise plan` with this recipe names what makes it fit; --force "
        "trains all the same."
    )


def planned(job: Job, data: Data, logger: RunLogger, options: Foresight) -> RunPlan | None:
    """The plan of the run, on rank 0. A collective, since every rank refuses what cannot fit.

    Raises:
        ConfigError: it cannot fit.
    """
    comm, sentence, plan = job.sharded.comm, "", None
    if comm.rank == 0:
        memory = memory_of(comm.device)
        try:
            with logger.busy("planning the run"):
                plan = plan_of(job, data.tokenizer.get_vocab_size(), options, memory)
            sentence = refusal(plan, memory, machine_memory(pinned=True))
        except Exception as error:  # noqa: BLE001 - what a model's own code raises without values
            logger.log(Warned(f"the run has no plan: {error}"))
    sentence = broadcast_object(comm, sentence, "plan")
    if sentence and not options.force:
        raise ConfigError(sentence)
    if sentence:
        logger.log(Warned(sentence))
    return plan


# ---- beside what ran ---------------------------------------------------------------------------


def compared(plan: RunPlan, step: Mapping[str, Any] | None, rate: float) -> Compared:
    """The plan beside what was measured.

    Args:
        step: the recorded one; ``None``: none was.
        rate: tokens per second over all ranks.
    """
    planned_mfu = None if plan.time is None else plan.time.mfu()
    off = [] if step is None else list(_terms_off(plan, step, rate))
    return Compared(
        planned_memory=_at_events(plan, step),
        memory=None if step is None else max(sum(nbytes) for _, nbytes, _ in step["moments"]),
        planned_rate=plan.rate,
        rate=rate,
        planned_mfu=planned_mfu,
        mfu=planned_mfu * rate / plan.rate if planned_mfu and plan.rate else None,
        off=tuple(off),
        differs=None if step is None else _first_that_differs(plan, step),
        events=len(plan.events),
    )


def _at_events(plan: RunPlan, step: Mapping[str, Any] | None) -> int:
    """Bytes at most after an event: a recording looks at no other moment."""
    at_events = [nbytes for _, nbytes in step["planned"] if nbytes is not None] if step else []
    return max(at_events, default=plan.peak)


def _terms_off(plan: RunPlan, step: Mapping[str, Any], rate: float) -> Iterator[str]:
    """Name the term of memory and that of time that differ most, where their sums differ."""
    measured = max(sum(nbytes) for _, nbytes, _ in step["moments"])
    if _is_off(measured, _at_events(plan, step)):
        columns = zip(*(nbytes for _, nbytes, _ in step["moments"]), strict=True)
        most = dict(zip(step["kinds"], map(max, columns), strict=True))
        kind = max(most, key=lambda kind: abs(most[kind] - plan.most[kind]))
        yield f"memory by {kind}: {size(plan.most[kind])} planned, {size(most[kind])} measured"
    if plan.time and plan.rate and _is_off(rate, plan.rate):
        took, seconds = seconds_of(step["moments"]), planned_seconds(plan.time)
        part = max(took, key=lambda part: abs(took[part] - seconds[part]))
        times = f"{seconds[part] * 1e3:,.1f} ms planned, {took[part] * 1e3:,.1f} measured"
        yield f"time by {part}: {times}"


def _is_off(measured: float, planned: float) -> bool:
    return abs(measured - planned) > OFF * planned


def planned_seconds(time: TimeForecast) -> dict[str, float]:
    """Seconds of a step in forward and backward passes, and the update."""
    forward = backward = 0.0
    for one, times in time.micro_batches:
        passes = [i for i in one.intervals if i.lane == "device" and i.phase is Phase.FORWARD]
        turn = max((interval.stop for interval in passes), default=0.0)
        forward += times * turn
        backward += times * (one.seconds - turn)
    return {"forward": forward, "backward": backward, "update": time.optimizer}


def seconds_of(moments: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Seconds of a recorded step in forward and backward passes, and after the last."""
    parts, since = {"forward": 0.0, "backward": 0.0, "update": 0.0}, moments[0][0]
    for seconds, _, event in moments[1:]:
        part = "update" if event is None else event[2]
        parts[part] += seconds - since
        since = seconds
    return parts


def _first_that_differs(plan: RunPlan, step: Mapping[str, Any]) -> str:
    """Name the first event that was not planned, or had other bytes of the engine; ``""``: none."""
    engine = [kind for kind in OF_ENGINE if kind is not Kind.JOINED] + [Kind.OPTIMIZER]
    rows = zip(step["moments"], step["planned"], plan_events(step["moments"]), strict=True)
    for (_, nbytes, event), (planned, _), number in rows:
        if event is None:
            continue
        kinds = dict(zip(step["kinds"], nbytes, strict=True))
        took = sum(kinds[kind] for kind in engine)
        if planned is not None and took != planned:
            return f"{event[0]} {event[1]}: {planned:,} bytes planned, {took:,} measured"
        if number >= len(plan.events) or plan.events[number].event[:3] != tuple(event[:3]):
            return f"{event[0]} {event[1]} was not planned"
    left = plan.events[number:]
    return f"{left[0].event[0]} {left[0].event[1]} was planned, and not done" if left else ""


def plan_events(moments: Sequence[Sequence[Any]]) -> Iterator[int]:
    """Number the events of a recorded step; what is none has the number of the next."""
    number = 0
    for _, _, event in moments:
        yield number
        number += event is not None
