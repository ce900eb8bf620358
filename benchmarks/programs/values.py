"""Parameters and gradients read and written by hand: averages, penalties, noise, logs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import Net, batches, mse
from benchmarks.programs.program import Values, of_rank, program, train


def average(target: nn.Module, source: nn.Module) -> None:
    """``target`` moves a fifth of the way to ``source``."""
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.lerp_(new, 0.2)


@program()
def ema(engine: Engine) -> Values:
    """An exponential average in a second sharded model."""
    model = Net()
    averaged = copy.deepcopy(model).requires_grad_(False)
    engine.shard(model)
    engine.shard(averaged)
    optimizer = SGD(model.parameters(), lr=0.1)
    values = train(engine, model, optimizer, after_step=lambda: average(averaged, model))
    return {**values, "averaged": engine.whole(averaged)}


@program()
def ema_partly_frozen(engine: Engine) -> Values:
    """The same for a model of which a part is frozen, so that the two are cut otherwise."""
    model = Net()
    model.inp.requires_grad_(False)
    for name, param in model.blocks.named_parameters():
        param.requires_grad_("up.weight" not in name)
    averaged = copy.deepcopy(model).requires_grad_(False)
    engine.shard(model)
    engine.shard(averaged)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    values = train(engine, model, optimizer, after_step=lambda: average(averaged, model))
    return {**values, "averaged": engine.whole(averaged)}


@program()
def ema_shadow(engine: Engine) -> Values:
    """Averages of p.data in a dict, put in place for an evaluation, and the old ones put back."""
    model, losses = Net(), list[float]()
    engine.shard(model)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def evaluate() -> None:
        for name, p in model.named_parameters():
            shadow[name] = 0.2 * p.data + 0.8 * shadow[name]
        backup = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = shadow[name]
        with torch.no_grad():
            x, y = batches()[0]
            losses.append(engine.mean(mse(model(engine.part(x)), engine.part(y))))
        for name, p in model.named_parameters():
            p.data = backup[name]

    values = train(engine, model, SGD(model.parameters(), lr=0.1), after_step=evaluate)
    return {**values, "averaged": losses}


@program()
def ema_whole(engine: Engine) -> Values:
    """Torch's AveragedModel, whole on every rank, updated where parameters are whole."""
    model = Net()
    averaged = AveragedModel(copy.deepcopy(model))
    engine.shard(model)

    def update() -> None:
        with engine.full_params(model):
            averaged.update_parameters(model)

    values = train(engine, model, SGD(model.parameters(), lr=0.1), after_step=update)
    return {**values, "averaged": dict(averaged.module.state_dict())}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al. 2021, arXiv 2010.01412)."""

    def __init__(self, params: list[nn.Parameter], rho: float = 0.5, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base = SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in params]), p=2)
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.5 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


@program()
def sam(engine: Engine) -> Values:
    """Sharpness-aware minimisation: two passes, a step by the norm of all gradients."""
    model, losses = Net(depth=2), []
    engine.shard(model)
    optimizer = Sam(list(model.parameters()))
    for x, y in of_rank(engine, batches()):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.first_step()
        mse(model(x), y).backward()
        optimizer.second_step()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def gradient_noise(engine: Engine) -> Values:
    """Gradients changed by hand before the step, and parameters updated without an optimizer."""
    model = Net()
    engine.shard(model)

    def change(_: Tensor) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).add_(p.detach(), alpha=2e-2)
            p.grad = p.grad.clamp(-1, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad.sign(), alpha=-1e-3)  # type: ignore[union-attr]

    return train(engine, model, SGD(model.parameters(), lr=0.1), change)


@program()
def log_gradients(engine: Engine) -> Values:
    """The norm, mean and largest magnitude of each gradient, for a log."""
    model, logs = Net(), list[list[float]]()
    engine.shard(model)

    def log(_: Tensor) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        logs.append([float(g.norm()) for g in gradients])
        logs.append([float(g.mean()) for g in gradients])
        logs.append([float(g.abs().max()) for g in gradients])

    values = train(engine, model, SGD(model.parameters(), lr=0.1), log)
    return {**values, "logs": logs}


@program()
def clip_weights(engine: Engine) -> Values:
    """Parameters clamped after each step (WGAN)."""
    model = Net()
    engine.shard(model)

    def clamp() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    return train(engine, model, SGD(model.parameters(), lr=0.1), after_step=clamp)


@program()
def weight_penalty(engine: Engine) -> Values:
    """Loss + c * sum(p.pow(2).sum() for p in model.parameters())."""
    model, losses = Net(), []
    engine.shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        loss = mse(model(engine.part(x)), engine.part(y))
        penalty = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        (loss + 1e-2 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}


@program()
def gradient_hooks(engine: Engine) -> Values:
    """A hook on each parameter halves its gradient; one after accumulation sees it."""
    model, seen = Net(), set[str]()
    engine.shard(model)
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient: gradient * 0.5)

        def look(param: Tensor, name: str = name) -> None:
            if param.grad is not None:
                seen.add(name)

        p.register_post_accumulate_grad_hook(look)
    values = train(engine, model, SGD(model.parameters(), lr=0.1))
    return {**values, "seen": sorted(seen)}


@program()
def gradient_penalty(engine: Engine) -> Values:
    """The gradient of the output by the input, in the loss (create_graph=True)."""
    model, losses = Net(outputs=1), []
    engine.shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for rows, _ in of_rank(engine, batches()):
        x = rows.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean(loss))
    return {"losses": losses, "parameters": engine.whole(model)}
