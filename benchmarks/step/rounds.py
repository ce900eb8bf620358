"""Interleaved rounds: every engine takes one step in each, so that all meet the same machine.

Before any clock runs, three steps decide whether there is anything to compare: the losses of
every engine must be those of a plain step whose gradients are averaged by an all-reduce, and
nobody can win by doing less. The plain step that serves as the unit of time talks to nobody, so
only its first loss can agree.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.crew import Seat
from benchmarks.step.engines import PLAIN, Engine, Setup, build, optimizer_for
from benchmarks.step.models import Batch
from benchmarks.step.traffic import CopiedBytes, written_bytes

__all__ = [
    "CHECKED",
    "TOLERANCE",
    "Lap",
    "Observed",
    "batch_of",
    "check_losses",
    "observe",
    "prepare",
    "rotated",
]

CHECKED = 3  # steps whose losses are compared
TOLERANCE = 1e-5  # of a loss, relative where it is above 1


@dataclass(frozen=True)
class Lap:
    """Seconds of one step: until the gradients are there, and the rest."""

    compute: float
    update: float

    @property
    def whole(self) -> float:
        return self.compute + self.update


@dataclass(frozen=True)
class Observed:
    """What one rank saw of one engine.

    Attributes:
        losses: of the checked steps.
        laps: one for each round.
        sent: bytes that left the process in one step.
        counted: the same as the engine's own counters have it; ``None`` for rivals.
        copied: bytes in one step.
    """

    losses: list[float]
    laps: list[Lap]
    sent: int
    counted: int | None
    copied: int


def observe(seat: Seat, setup: Setup, names: Sequence[str], rounds: int) -> None:
    """What a rank of the crew runs. Tells a dictionary: engine → ``Observed``."""
    with seat.group():
        prepare(names)
        batches = [batch_of(setup, seat.rank, step) for step in range(CHECKED + rounds)]
        expected = _averaged_by_hand(setup, batches[:CHECKED])
        engines: dict[str, Engine] = {}
        first: dict[str, tuple[list[float], int, int | None, int]] = {}
        for name in names:
            engines[name] = build(name, setup)
            first[name] = _first_steps(engines[name], batches[:CHECKED])
            check_losses(name, first[name][0], expected, setup.model)
        laps = _rounds(engines, batches[CHECKED:])
        seat.tell(
            {
                name: Observed(losses, laps[name], sent, counted, copied)
                for name, (losses, sent, counted, copied) in first.items()
            }
        )


def prepare(names: Sequence[str]) -> None:
    """DeepSpeed wants to be told that the group exists, and says much about itself."""
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
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_for(trained, setup.optimizer)
    losses = []
    for batch in batches:
        loss: Tensor = setup.task.loss(model, batch)
        loss.backward()
        for param in trained:
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
    if any(abs(mine - right) > TOLERANCE * max(1.0, abs(right)) for mine, right in pairs):
        raise RuntimeError(
            f"{name} on {model}: losses {losses[:compared]}, but plain training on averaged "
            f"gradients gives {expected[:compared]}: they differ by more than {TOLERANCE}, so "
            "times would compare different work."
        )


def _first_steps(
    engine: Engine, batches: Sequence[Batch]
) -> tuple[list[float], int, int | None, int]:
    """Losses, bytes sent, bytes counted, bytes copied. The first step may also set things up."""
    losses = [_step(engine, batches[0]).item()]
    written, before = written_bytes(), _counted(engine)
    losses.append(_step(engine, batches[1]).item())
    sent, after = written_bytes() - written, _counted(engine)
    with CopiedBytes() as copies:
        losses += [_step(engine, batch).item() for batch in batches[2:]]
    counted = None if before is None or after is None else after - before
    return losses, sent, counted, copies.nbytes


def _counted(engine: Engine) -> int | None:
    return None if engine.counters is None else sum(engine.counters.bytes_sent.values())


def _step(engine: Engine, batch: Batch) -> Tensor:
    loss = engine.compute(batch)
    engine.update()
    return loss


def _rounds(engines: dict[str, Engine], batches: Sequence[Batch]) -> dict[str, list[Lap]]:
    """One lap of each engine in each round."""
    laps: dict[str, list[Lap]] = {name: [] for name in engines}
    gc.disable()  # and collected between rounds: a pause belongs to nobody
    for number, batch in enumerate(batches):
        gc.collect()
        for name in rotated(list(engines), number):
            dist.barrier()  # ranks start together, and the last step's messages are gone
            laps[name].append(_lap(engines[name], batch))
    gc.enable()
    return laps


def rotated(names: list[str], number: int) -> list[str]:
    """The order of round ``number``: everybody is first, and has two different predecessors."""
    start = number % len(names)
    turned = names[start:] + names[:start]
    return turned if (number // len(names)) % 2 == 0 else turned[::-1]


def _lap(engine: Engine, batch: Batch) -> Lap:
    start = perf_counter()
    engine.compute(batch)
    middle = perf_counter()
    engine.update()
    return Lap(middle - start, perf_counter() - middle)
