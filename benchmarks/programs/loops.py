"""Ways to write the training loop: accumulation, clipping, scaling, schedules, evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import Net, batches
from benchmarks.programs.program import Values, program, train

ADAM: Any = {"lr": 1e-2, "eps": 1e-3}  # that eps keeps rounding from being amplified


@program()
def sgd(engine: Engine) -> Values:
    """SGD with momentum."""
    model = engine.shard(Net())
    return train(engine, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


@program()
def adamw(engine: Engine) -> Values:
    """AdamW with parameter groups by the parameters' names."""
    model = engine.shard(Net())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.5},
    ]
    return train(engine, model, AdamW(groups, **ADAM))


@program()
def weight_decay_by_ndim(engine: Engine) -> Values:
    """No weight decay for parameters of fewer than two dimensions."""
    model = engine.shard(Net())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
    ]
    return train(engine, model, AdamW(groups, **ADAM))


@program()
def accumulate(engine: Engine) -> Values:
    """Two micro-batches, the first without communication."""
    model = engine.shard(Net())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with engine.no_sync(model):
            (mse_loss(model(x), y) / 2).backward()
        return mse_loss(model(2 * x), y) / 2

    return train(engine, model, loss=loss)


@program()
def zero_grad_while_accumulating(engine: Engine) -> Values:
    """A micro-batch under no_sync is thrown away by zero_grad()."""
    model = engine.shard(Net())
    optimizer = SGD(model.parameters(), lr=0.1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with engine.no_sync(model):
            (100 * mse_loss(model(x), y)).backward()
        optimizer.zero_grad()
        return mse_loss(model(x), y)

    return train(engine, model, optimizer, loss)


@program()
def clip(engine: Engine) -> Values:
    """Gradients clipped by their global norm, as the engine offers it."""
    model, norms = engine.shard(Net()), list[float]()
    optimizer = SGD(model.parameters(), lr=0.5)

    def before_step() -> None:
        norms.append(engine.clip(model, 0.5))

    return {**train(engine, model, optimizer, before_step=before_step), "norms": norms}


@program()
def total_norm(engine: Engine) -> Values:
    """torch.nn.utils.get_total_norm and clip_grads_with_norm_."""
    model, norms = engine.shard(Net()), list[float]()
    optimizer = SGD(model.parameters(), lr=0.5)

    def before_step() -> None:
        norm = nn.utils.get_total_norm(gradients(model))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        norms.append(float(norm))

    return {**train(engine, model, optimizer, before_step=before_step), "norms": norms}


def gradients(model: nn.Module) -> list[Tensor]:
    """Of the parameters that have one."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def overflowing() -> list[tuple[Tensor, Tensor]]:
    """Batches of which the second has an infinite target in its first row."""
    pairs = batches()
    pairs[1][1][0, 0] = math.inf
    return pairs


@program()
def skip_not_finite(engine: Engine) -> Values:
    """A step is skipped where a gradient is not finite, which one rank's rows cause."""
    model = engine.shard(Net())
    optimizer = SGD(model.parameters(), lr=0.1)

    def step() -> None:
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients(model)):
            optimizer.step()

    return train(engine, model, optimizer, data=overflowing(), step=step)


@program(tolerance=2e-2)
def autocast(engine: Engine) -> Values:
    """torch.autocast in bfloat16."""
    model = engine.shard(Net(depth=2))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse_loss(model(x).float(), y)

    return train(engine, model, SGD(model.parameters(), lr=0.05), loss)


@program()
def grad_scaler(engine: Engine) -> Values:
    """torch.amp.GradScaler, where one rank's rows overflow in one step."""
    model, scales = engine.shard(Net(depth=2)), list[float]()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return scaler.scale(mse_loss(model(x), y))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    return {**train(engine, model, optimizer, loss, overflowing(), step=step), "scales": scales}


@program()
def schedule(engine: Engine) -> Values:
    """StepLR, and a parameter group that is added in the middle."""
    model = engine.shard(Net())
    optimizer = SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    first = train(engine, model, optimizer, after_step=scheduler.step)
    optimizer.add_param_group({"params": list(model.out.parameters()), "lr": 0.05})
    return {"first": first, "second": train(engine, model, optimizer)}


@program()
def two_losses(engine: Engine) -> Values:
    """Two backward passes through one graph; then two forward passes, one backward."""
    model = engine.shard(Net())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        mse_loss(out, y).backward(retain_graph=True)
        out.abs().mean().backward()
        return mse_loss(model(x), y) + mse_loss(model(-x), y)

    return train(engine, model, loss=loss)


@program()
def activation_checkpointing(engine: Engine) -> Values:
    """torch.utils.checkpoint around each block."""
    model = Net()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return train(engine, engine.shard(model))


@program()
def interrupted(engine: Engine) -> Values:
    """Ctrl-C in a forward pass, whole values to save what was learnt, and on with training."""
    model = Net()
    interrupts = [False]

    def interrupt(*_: object) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt

    model.blocks[1].register_forward_pre_hook(interrupt)
    engine.shard(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = train(engine, model, optimizer)
    interrupts[0] = True
    try:
        train(engine, model, optimizer)
    except KeyboardInterrupt:
        optimizer.zero_grad()
        saved = engine.whole(model)
    interrupts[0] = False
    return {"first": first, "saved": saved, "second": train(engine, model, optimizer)}


@program()
def optimizer_state_from_unsharded(engine: Engine) -> Values:
    """AdamW's whole state of an unsharded run, loaded after sharding."""
    model = Net()
    optimizer = Adam(model.parameters(), **ADAM)
    for x, y in batches(2):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    engine.shard(model)
    optimizer = Adam(model.parameters(), **ADAM)
    optimizer.load_state_dict(state)
    return train(engine, model, optimizer)
