"""Ranks that do not do the same, failures, and calls other than ``model(x)``: pains 1–5, 17–19."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from benchmarks.scorecard.case import Case
from benchmarks.scorecard.engines import Engine
from benchmarks.scorecard.nets import (
    STEPS,
    WIDTH,
    Block,
    Net,
    Values,
    batch,
    seeded,
    squares,
    train,
)

TIMEOUT = 3.0


class Branches(Net):
    """The block numbered by the caller is skipped."""

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number != skipped else x
        out: Tensor = self.head(x)
        return out


def branches(engine: Engine, skips: dict[int, int]) -> Values:
    """``skips``: rank → the block that it leaves out."""
    model = engine.shard(seeded(Branches))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        out: Tensor = model(batch(rank, step), skips.get(rank))
        return F.mse_loss(out, torch.ones(out.shape))

    return train(engine, model, loss)


def uneven(engine: Engine) -> Values:
    """Rank 1 has one batch less; gradients are means over the ranks that have one."""
    model = engine.shard(seeded())
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        busy = [rank for rank in engine.ranks if rank == 0 or step < STEPS - 1]
        for rank in busy:
            (squares(model, rank, step) / len(busy)).backward()
        if busy:
            optimizer.step()
            optimizer.zero_grad()
    return engine.whole(model)


def stalled(engine: Engine) -> Values:
    """Rank 1's data loader takes longer than a collective may."""
    model = engine.shard(seeded())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        if engine.ranks == (1,) and step == 1:
            time.sleep(3 * TIMEOUT)
        return squares(model, rank, step)

    return train(engine, model, loss)


def failed(engine: Engine) -> Values:
    """Rank 1 raises, and its process ends."""
    model = engine.shard(seeded())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        if engine.ranks == (1,) and step == 1:
            raise FileNotFoundError
        return squares(model, rank, step)

    return train(engine, model, loss)


def checkpointed(engine: Engine) -> Values:
    """Activation checkpointing, and two forward passes before the backward pass."""
    model = engine.shard(seeded())

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return squares(model, rank, step) + squares(model, rank, step + 10)

    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return train(engine, model, loss)


def other_method(engine: Engine, register: bool) -> Values:
    model = engine.shard(seeded())
    if register:
        engine.forward_method(model, "encode")

    def loss(model: Any, rank: int, step: int) -> Tensor:
        out: Tensor = model.encode(batch(rank, step))
        return F.mse_loss(out, torch.ones(out.shape))

    return train(engine, model, loss)


def whole_written(engine: Engine) -> Values:
    model = engine.shard(seeded())
    train(engine, model)
    with engine.full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return train(engine, model)


def whole_read(engine: Engine) -> Values:
    model = engine.shard(seeded())
    train(engine, model)
    with engine.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def compiled(engine: Engine) -> Values:
    model = engine.shard(seeded())
    run: Any = torch.compile(model, backend="aot_eager")
    return train(engine, model, lambda _, rank, step: squares(run, rank, step))


def compiled_blocks(engine: Engine) -> Values:
    model = seeded()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return train(engine, engine.shard(model))


def in_place_on_a_view(engine: Engine) -> Values:
    """A block returns a view, and its caller writes to it: pytorch#181832."""

    class View(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, WIDTH)

    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.add_(1.0)
            out: Tensor = self.head(x)
            return out

    def views(net: Net) -> None:
        net.blocks = nn.ModuleList(View() for _ in range(3))

    return train(engine, engine.shard(seeded(lambda: Writes(views))))


def accumulated(engine: Engine) -> Values:
    """Three micro-batches, reduced once."""
    model = engine.shard(seeded())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        for part in (10, 20):
            with engine.accumulate(model, last=False):
                (squares(model, rank, step + part) / len(engine.ranks)).backward()
        return squares(model, rank, step)

    optimizer = SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for rank in engine.ranks:
            value = loss(model, rank, number)
            with engine.accumulate(model, last=True):
                (value / len(engine.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.whole(model)


def interrupted(engine: Engine) -> Values:
    """An error in the middle of a step, as when memory is short; the step is taken again."""
    model = engine.shard(seeded())
    fails = [True]

    def hook(*_: Any) -> None:
        if fails.pop() if fails else False:
            raise MemoryError

    model.get_submodule("blocks.1").register_forward_hook(hook)
    for rank in engine.ranks[:1]:
        try:
            squares(model, rank, 0).backward()
        except MemoryError:
            model.zero_grad()
    return train(engine, model)


unregistered = partial(other_method, register=False)
RANKS = ("rank [01]", r"blocks\.\d|head|step")
CASES = (
    Case("1", "one rank skips a branch", partial(branches, skips={1: 1}), RANKS),
    Case("2", "each rank uses another branch", partial(branches, skips={0: 0, 1: 1}), RANKS),
    Case("3", "one rank has less data", uneven, RANKS),
    Case("4", "one rank is slower than the timeout", stalled, RANKS, timeout=TIMEOUT),
    Case("4", "one rank fails", failed, RANKS),
    Case("5", "checkpointed blocks, two forward passes", checkpointed),
    Case("17", "a method other than forward, registered", partial(other_method, register=True)),
    Case("17", "a method other than forward, not registered", unregistered, ("parameter",)),
    Case("18", "whole parameters are read", whole_read),
    Case("18", "whole parameters are written", whole_written),
    Case("19", "torch.compile(model)", compiled),
    Case("19", "block.compile(fullgraph=True)", compiled_blocks),
    Case("24", "micro-batches that reduce once", accumulated),
    Case("25", "a block's output is written in place", in_place_on_a_view),
    Case("26", "an error in a step, and on", interrupted),
)  # fmt: skip
