"""What is easily done wrong: an error that names it, or the numbers that were meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD

from benchmarks.scorecard.case import Case
from benchmarks.scorecard.engines import Engine
from benchmarks.scorecard.nets import STEPS, WIDTH, Net, Values, batch, seeded, squares, train


def optimizer_first(engine: Engine) -> Values:
    model = seeded()
    optimizer = SGD(model.parameters(), lr=0.1)
    return train(engine, engine.shard(model), optimizer=optimizer)


def instead(engine: Engine, loss: Callable[[Any, Tensor], Tensor]) -> Values:
    """Another way to a loss than ``model(x)``."""
    model = engine.shard(seeded())
    return train(engine, model, lambda m, rank, step: loss(m, batch(rank, step)).square().mean())


def by_a_weight(model: Any, x: Tensor) -> Tensor:
    return F.linear(x, model.blocks[0].up.weight)


def penalty(model: Any, x: Tensor) -> Tensor:
    return torch.stack([model(x).sum(), *(p.sum() for p in model.parameters())])


def block_first(model: Any, x: Tensor) -> Tensor:
    return torch.cat([model.blocks[1](x), model(x)], dim=1)


def second_derivative(engine: Engine) -> Values:
    """A gradient penalty, by ``create_graph=True``."""
    model = engine.shard(seeded())
    total = torch.zeros(())
    for rank in engine.ranks:
        (squares(model, rank, 0) / len(engine.ranks)).backward(create_graph=True)
    for param in model.parameters():
        assert param.grad is not None
        total = total + param.grad.square().sum()
    total.backward()
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def gradients(engine: Engine) -> Values:
    """Gradients by ``torch.autograd.grad``."""
    model = engine.shard(seeded())
    names, params = zip(*model.named_parameters(), strict=True)
    loss = sum(squares(model, rank, 0) / len(engine.ranks) for rank in engine.ranks)
    return dict(zip(names, torch.autograd.grad(loss, params), strict=True))  # type: ignore[arg-type]


def gradient_norms(engine: Engine) -> Values:
    """Norms for a log, of each parameter by itself."""
    model = engine.shard(seeded())
    for rank in engine.ranks:
        (squares(model, rank, 0) / len(engine.ranks)).backward()
    norms = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
    return {name: torch.as_tensor(float(norm)) for name, norm in norms.items()}


def alone(engine: Engine, does: Callable[[Any], object]) -> Values:
    """Rank 0 alone does something between steps."""
    model = engine.shard(seeded())
    train(engine, model)
    if 0 in engine.ranks:
        does(model)
    return train(engine, model)


def plain_state(engine: Engine) -> Values:
    """A state dict of the plain model is loaded."""
    model = engine.shard(seeded())
    model.load_state_dict(seeded(lambda: (torch.manual_seed(7), Net())[1]).state_dict())
    return train(engine, model)


def added(engine: Engine) -> Values:
    """A layer is replaced after sharding."""
    model = engine.shard(seeded())
    torch.manual_seed(engine.ranks[0])  # as generators differ where ranks draw their own data
    model.head = nn.Linear(WIDTH, 5)
    return train(engine, model)


def different(engine: Engine, width: int) -> Values:
    """Rank 1 builds another model."""
    torch.manual_seed(engine.ranks[0])
    model = Net()
    if engine.ranks == (1,):
        model.head = nn.Linear(WIDTH, width)
    return train(engine, engine.shard(model))


def twice(engine: Engine) -> Values:
    return train(engine, engine.shard(engine.shard(seeded())))


def never_last(engine: Engine) -> Values:
    """Micro-batches are accumulated, and none is the last."""
    model = engine.shard(seeded())
    optimizer = SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for rank in engine.ranks:
            with engine.accumulate(model, last=False):
                (squares(model, rank, step) / len(engine.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.whole(model)


def frozen_later(engine: Engine) -> Values:
    model = engine.shard(seeded())
    train(engine, model)
    model.get_submodule("blocks.1").requires_grad_(False)
    train(engine, model)
    model.get_submodule("blocks.1").requires_grad_(True)
    return train(engine, model)


def second_order(engine: Engine) -> Values:
    """LBFGS, whose step needs the whole gradient."""
    model = engine.shard(seeded())
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        losses = [squares(model, rank, 0) / len(engine.ranks) for rank in engine.ranks]
        for loss in losses:
            loss.backward()
        return float(sum(losses))

    optimizer.step(closure)
    return engine.whole(model)


def evaluate(model: Any) -> object:
    with torch.no_grad():
        return model(batch(0, 99))


NAMED = ("parameter '?[a-z.\\d]+'? |weight",)
CASES = tuple(
    Case("misuse", title, run, names)
    for title, run, names in (
        ("an optimizer made before sharding", optimizer_first, ()),
        ("model.forward(x)", partial(instead, loss=lambda m, x: m.forward(x)), NAMED),
        ("a layer's weight outside its forward", partial(instead, loss=by_a_weight), NAMED),
        ("a penalty on every parameter", partial(instead, loss=penalty), NAMED),
        ("a block called before the model", partial(instead, loss=block_first), ("root|block",)),
        ("backward(create_graph=True)", second_derivative, ("graph",)),
        ("autograd.grad of parameters", gradients, ("autograd.grad",)),
        ("each gradient's norm in a log", gradient_norms, ("grad",)),
        ("state_dict() on rank 0 alone", partial(alone, does=nn.Module.state_dict), ("rank 1",)),
        ("evaluation on rank 0 alone", partial(alone, does=evaluate), ("rank [01]",)),
        ("load_state_dict() of a plain model", plain_state, ("state_dict", "parameter")),
        ("a layer replaced after sharding", added, ("head",)),
        ("other initial values on rank 1", partial(different, width=5), ("rank 1|differ",)),
        ("another shape on rank 1", partial(different, width=6), ("head", "rank 1|differ")),
        ("sharded twice", twice, ("already|twice",)),
        ("a step without a last micro-batch", never_last, ("reduced|last",)),
        ("frozen and unfrozen between steps", frozen_later, ("requires_grad",)),
        ("LBFGS", second_order, ("LBFGS",)),
    )
)
