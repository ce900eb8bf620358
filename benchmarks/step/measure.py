"""What each rank does: steps that must agree, steps that are counted, and interleaved rounds.

Before any clock runs, three steps decide whether there is anything to compare: the losses of
every engine must be those of a plain step whose gradients are averaged by an all-reduce, and
nobody can win by doing less. The plain step that serves as the unit of time sends nothing, so
only its first loss can agree.
"""

from __future__ import annotations

import cProfile
import io
import logging
import pstats
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.memory import held_by, samples, trim
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.workers import Worker, Workers
from benchmarks.step.engines import ENGINES, PLAIN, Setup, optimizer_for
from benchmarks.step.traffic import CopiedBytes, written_bytes
from benchmarks.training import Batch, Engine, trained

CHECKED = 3  # steps whose losses are compared
TOLERANCE = 1e-5  # of a loss, relative where it is above 1
WATCHED = 4  # steps during which memory is watched
LISTED = 40  # functions of a profile


@dataclass(frozen=True)
class Lap:
    """Seconds of one step: until the gradients are there, and the rest."""

    compute: float
    update: float

    @property
    def whole(self) -> float:
        return self.compute + self.update


@dataclass(frozen=True)
class Measured:
    """What one rank measured of one engine."""

    losses: list[float]  # of the checked steps
    laps: list[Lap]  # one for each round
    sent: int  # bytes that left the process in one step
    counted: int | None  # the same as the engine's own counters have it; ``None`` for rivals
    copied: int  # bytes in one step


def measure(worker: Worker, setup: Setup, names: Sequence[str], rounds: int) -> None:
    """What each rank runs. Sends a dictionary: engine → ``Measured``."""
    with worker.group():
        prepare(names)
        batches = [batch_of(setup, worker.rank, step) for step in range(CHECKED + rounds)]
        expected = _averaged_by_hand(setup, batches[:CHECKED])
        engines: dict[str, Engine] = {}
        measured: dict[str, Measured] = {}
        for name in names:
            engines[name] = ENGINES[name](setup)
            measured[name] = _first_steps(engines[name], batches[:CHECKED])
            check_losses(name, measured[name].losses, expected, setup.model)

        def lap(name: str, number: int) -> Lap:
            dist.barrier()  # ranks start together, and the last step's messages are gone
            return _lap(engines[name], batches[CHECKED + number])

        laps = interleaved(names, rounds, lap)
        worker.send({name: replace(each, laps=laps[name]) for name, each in measured.items()})


def prepare(names: Sequence[str]) -> None:
    """Tell DeepSpeed that the group exists, and silence it."""
    if not any(name.startswith("deepspeed") for name in names):
        return
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # it calls torch by names of yesterday
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)


def batch_of(setup: Setup, rank: int, step: int) -> Batch:
    """The same for every engine; another one for each rank and step."""
    return setup.task.batch(torch.Generator().manual_seed(1_000 * (step + 1) + rank))


def _averaged_by_hand(setup: Setup, batches: Sequence[Batch]) -> list[float]:
    """The losses that every engine must show: plain training on averaged gradients."""
    model = setup.new_model()
    params = trained(model)
    optimizer = optimizer_for(params, setup.optimizer)
    losses = []
    for batch in batches:
        loss = setup.task.loss(model, batch)
        loss.backward()
        for param in params:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_losses(name: str, losses: list[float], expected: list[float], model: str) -> None:
    """Raises ``RuntimeError`` where an engine trains something else."""
    compared = 1 if name == PLAIN else len(expected)
    pairs = list(zip(losses, expected, strict=True))[:compared]
    if any(abs(loss - right) > TOLERANCE * max(1.0, abs(right)) for loss, right in pairs):
        raise RuntimeError(
            f"{name} on {model}: losses {losses[:compared]}, but plain training on averaged "
            f"gradients gives {expected[:compared]}: they differ by more than {TOLERANCE}, so "
            "times would compare different work."
        )


def _first_steps(engine: Engine, batches: Sequence[Batch]) -> Measured:
    """Everything but laps. The first step may also set things up."""
    losses = [step(engine, batches[0]).item()]
    written, before = written_bytes(), _counted(engine)
    losses.append(step(engine, batches[1]).item())
    sent, after = written_bytes() - written, _counted(engine)
    with CopiedBytes() as copies:
        losses += [step(engine, batch).item() for batch in batches[2:]]
    counted = None if before is None or after is None else after - before
    return Measured(losses, [], sent, counted, copies.nbytes)


def _counted(engine: Engine) -> int | None:
    return None if engine.counters is None else sum(engine.counters.bytes_sent.values())


def step(engine: Engine, batch: Batch) -> Tensor:
    """One step of training; its loss, 0-dim."""
    loss = engine.compute(batch)
    engine.update()
    return loss


def _lap(engine: Engine, batch: Batch) -> Lap:
    start = perf_counter()
    engine.compute(batch)
    middle = perf_counter()
    engine.update()
    return Lap(middle - start, perf_counter() - middle)


# ---- one engine alone ----------------------------------------------------------------------


def peak_memory(name: str, setup: Setup, world: int) -> tuple[int, int, float]:
    """Bytes that the ranks of one engine hold, in processes of their own, seen from outside.

    Returns:
        Proportional set sizes summed over ranks: the most while they train, and before the model
        is built; and the seconds of the fastest step.
    """
    with Workers(world, _train, name, setup) as workers:
        start = sum(workers.receive())  # the group exists, the model does not
        workers.receive()  # two steps are done: nothing is set up any more
        peak = max((sum(each) for each in samples(workers, "Pss:")), default=0)
        return peak, start, min(map(max, zip(*workers.receive(), strict=True)))


def _train(worker: Worker, name: str, setup: Setup) -> None:
    with worker.group():
        prepare([name])
        batches = [batch_of(setup, worker.rank, number) for number in range(2 + WATCHED)]
        dist.barrier()  # a part of what ranks share counts for each: all have it
        worker.send(held_by("self", "Pss:"))
        dist.barrier()
        engine = ENGINES[name](setup)
        seconds: list[float] = []
        for number, batch in enumerate(batches):
            if number == 2:
                trim()
                dist.barrier()
                worker.send("trains")
            lap = _lap(engine, batch)
            seconds += [lap.whole] if number >= 2 else []
        worker.send(seconds)
        dist.barrier()


def profile(worker: Worker, name: str, setup: Setup, steps: int) -> None:
    """Send the functions of these steps with the most time of their own, and who calls them.

    Python's profiler slows Python down but not torch: the shares of Python are too large.
    """
    with worker.group():
        prepare([name])
        engine, batch = ENGINES[name](setup), batch_of(setup, worker.rank, 0)
        for _ in range(CHECKED):
            step(engine, batch)
        with cProfile.Profile() as profiler:
            for _ in range(steps):
                step(engine, batch)
        text = io.StringIO()
        stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
        stats.print_stats(LISTED).print_callers(LISTED)
        worker.send(text.getvalue())
