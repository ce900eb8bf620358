"""A program: a name, one line about it, and what it computes under an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import batches
from benchmarks.training import trained

Values = dict[str, Any]
"""What must be equal: losses, norms, whole parameters."""


@dataclass(frozen=True)
class Program:
    """Something that users do."""

    name: str  # of the function that does it
    about: str  # its docstring, one line
    run: Callable[[Engine], Values]  # computes under an engine what must be equal to plain PyTorch
    tolerance: float  # relative and absolute, of floats and tensors


PROGRAMS: dict[str, Program] = {}


def program(
    tolerance: float = 2e-5,
) -> Callable[[Callable[[Engine], Values]], Callable[[Engine], Values]]:
    """Register a function as a program."""

    def register(run: Callable[[Engine], Values]) -> Callable[[Engine], Values]:
        about = (run.__doc__ or "").strip().rstrip(".")
        PROGRAMS[run.__name__] = Program(run.__name__, about, run, tolerance)
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
    optimizer: Optimizer | None = None,
    loss: Callable[..., Tensor] | None = None,
    data: Iterable[tuple[Tensor, ...]] | None = None,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    step: Callable[[], object] | None = None,
) -> Values:
    """The loop of every tutorial; the losses, averaged over ranks, and the whole parameters.

    Args:
        engine: how it is run.
        model: sharded by it.
        optimizer: SGD with a rate of 0.1 if not given.
        loss: of this rank's rows of a batch; the mean square error of ``model`` if not given.
        data: global batches; ``batches()`` if not given.
        before_step: called after each backward pass.
        after_step: called after each step.
        step: instead of the optimizer's.
    """
    optimizer = optimizer or SGD(trained(model), lr=0.1)
    loss = loss or (lambda x, y: mse_loss(model(x), y))
    losses = []
    for batch in of_rank(engine, batches() if data is None else data):
        value = loss(*batch)
        value.backward()
        before_step()
        (step or optimizer.step)()
        optimizer.zero_grad()
        after_step()
        losses.append(engine.mean(value))
    return {"losses": losses, "parameters": engine.whole(model)}
