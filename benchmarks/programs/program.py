"""A program: a name, one line about it, and what it computes under an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import batches, mse

Values = dict[str, Any]
"""What must be equal: losses, norms, whole parameters."""


@dataclass(frozen=True)
class Program:
    """Something that users do."""

    name: str  # of the function that does it
    about: str  # its docstring, one line
    kind: str  # of the file in which it stands
    run: Callable[[Engine], Values]  # computes under an engine what must be equal to plain PyTorch
    tolerance: float  # relative and absolute, of floats and tensors


PROGRAMS: dict[str, Program] = {}


def program(
    tolerance: float = 2e-5,
) -> Callable[[Callable[[Engine], Values]], Callable[[Engine], Values]]:
    """Register a function as a program."""

    def register(run: Callable[[Engine], Values]) -> Callable[[Engine], Values]:
        kind = run.__module__.rpartition(".")[2]
        about = (run.__doc__ or "").strip().rstrip(".")
        PROGRAMS[run.__name__] = Program(run.__name__, about, kind, run, tolerance)
        return run

    return register


def of_rank(
    engine: Engine, global_batches: Iterable[tuple[Tensor, ...]]
) -> Iterator[tuple[Tensor, ...]]:
    """This rank's rows of each global batch."""
    for batch in global_batches:
        yield tuple(engine.part(rows) for rows in batch)


def train(
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[Tensor], object] = lambda _: None,
    after_step: Callable[[], object] = lambda: None,
) -> Values:
    """The loop of every tutorial, on ``[12, 7] → [12, 3]``; the losses and the whole parameters."""
    losses = []
    for x, y in of_rank(engine, batches()):
        loss = mse(model(x), y)
        loss.backward()
        before_step(loss)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}
