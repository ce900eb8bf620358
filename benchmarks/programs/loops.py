"""Ways to write the training loop: accumulation, clipping, scaling, schedules, evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import Net, batches, mse
from benchmarks.programs.program import Values, of_rank, program, train

ADAM: Any = {"lr": 1e-2, "eps": 1e-3}  # that eps keeps rounding from being amplified


@program()
def sgd(engine: Engine) -> Values:
    """SGD with momentum."""
    model = Net()
    engine.shard(model)
    return train(engine, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


@program()
def adamw(engine: Engine) -> Values:
    """AdamW, made before the model is sharded by its parameters' names."""
    model = Net()
    engine.shard(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.5},
    ]
    return train(engine, model, AdamW(groups, **ADAM))


@program()
def weight_decay_by_ndim(engine: Engine) -> Values:
    """No weight decay for parameters of fewer than two dimensions."""
    model = Net()
    engine.shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
    ]
    return train(engine, model, AdamW(groups, **ADAM))


@program()
def accumulate(engine: Engine) -> Values:
    """Two micro-batches, the first without communication."""
    model = Net()
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.1), []
    for x, y in of_rank(engine, batches()):
        with engine.no_sync(model):
            (mse(model(x), y) / 2).backward()
        loss = mse(model(2 * x), y) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def zero_grad_while_accumulating(engine: Engine) -> Values:
    """A micro-batch under no_sync is thrown away by zero_grad()."""
    model = Net()
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.1), []
    for x, y in of_rank(engine, batches()):
        with engine.no_sync(model):
            (100 * mse(model(x), y)).backward()
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def clip(engine: Engine) -> Values:
    """Gradients clipped by their global norm, as the engine offers it."""
    model, norms = Net(), list[float]()
    engine.shard(model)
    optimizer = SGD(model.parameters(), lr=0.5)
    values = train(engine, model, optimizer, lambda _: norms.append(engine.clip(model, 0.5)))
    return {**values, "norms": norms}


@program()
def clip_value(engine: Engine) -> Values:
    """torch.nn.utils.clip_grad_value_."""
    model = Net()
    engine.shard(model)
    optimizer = SGD(model.parameters(), lr=0.5)
    return train(
        engine,
        model,
        optimizer,
        lambda _: nn.utils.clip_grad_value_(model.parameters(), 0.05),
    )


@program()
def total_norm(engine: Engine) -> Values:
    """torch.nn.utils.get_total_norm and clip_grads_with_norm_."""
    model, norms = Net(), list[float]()
    engine.shard(model)

    def clip_with_norm(_: object) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        norms.append(float(norm))

    values = train(engine, model, SGD(model.parameters(), lr=0.5), clip_with_norm)
    return {**values, "norms": norms}


def overflowing() -> list[tuple[Tensor, Tensor]]:
    """Batches of which the second has an infinite target in its first row."""
    pairs = batches()
    pairs[1][1][0, 0] = math.inf
    return pairs


@program()
def skip_not_finite(engine: Engine) -> Values:
    """A step is skipped where a gradient is not finite, which one rank's rows cause."""
    model = Net()
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.1), []
    for x, y in of_rank(engine, overflowing()):
        loss = mse(model(x), y)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program(tolerance=2e-2)
def autocast(engine: Engine) -> Values:
    """torch.autocast in bfloat16."""
    model = Net(depth=2)
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.05), []
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model(engine.part(x)).float(), engine.part(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def grad_scaler(engine: Engine) -> Values:
    """torch.amp.GradScaler, where one rank's rows overflow in one step."""
    model = Net(depth=2)
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.05), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for x, y in of_rank(engine, overflowing()):
        loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(scaler.get_scale())
    return {"scales": losses, "parameters": engine.whole(model)}


@program()
def schedule(engine: Engine) -> Values:
    """OneCycleLR and a parameter group that is added in the middle."""
    model = Net()
    engine.shard(model)
    optimizer = SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    first = train(engine, model, optimizer, after_step=scheduler.step)
    optimizer.add_param_group({"params": list(model.out.parameters()), "lr": 0.05})
    return {"first": first, "second": train(engine, model, optimizer)}


@program()
def evaluate_between(engine: Engine) -> Values:
    """An evaluation under no_grad between forward and backward, and one between steps."""
    model = Net()
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.1), []
    for x, y in of_rank(engine, batches()):
        loss = mse(model(x), y)
        with torch.no_grad():
            losses.append(engine.mean(mse(model(-x), y)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            losses.append(engine.mean(mse(model(x), y)))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def two_losses(engine: Engine) -> Values:
    """Two forward passes, one backward; then two backward passes through one graph."""
    model = Net()
    engine.shard(model)
    optimizer, losses = SGD(model.parameters(), lr=0.1), []
    for x, y in of_rank(engine, batches()):
        loss = mse(model(x), y) + mse(model(-x), y)
        loss.backward()
        out = model(x)
        mse(out, y).backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def activation_checkpointing(engine: Engine) -> Values:
    """torch.utils.checkpoint around each block."""
    model = Net()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    engine.shard(model)
    return train(engine, model, SGD(model.parameters(), lr=0.1))


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
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    engine.shard(model)
    optimizer = Adam(model.parameters(), **ADAM)
    optimizer.load_state_dict(state)
    return train(engine, model, optimizer)
