"""Parameters and gradients read and written by hand: averages, penalties, noise, logs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import Net, batches
from benchmarks.programs.program import Values, program, train


def with_average(engine: Engine, model: nn.Module) -> Values:
    """Train, with an exponential average in a second sharded model."""
    averaged = copy.deepcopy(model).requires_grad_(False)
    engine.shard(model)
    engine.shard(averaged)

    def after_step() -> None:
        with torch.no_grad():
            for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.2)

    values = train(engine, model, after_step=after_step)
    return {**values, "averaged": engine.whole(averaged)}


@program()
def ema(engine: Engine) -> Values:
    """An exponential average in a second sharded model."""
    return with_average(engine, Net())


@program()
def ema_partly_frozen(engine: Engine) -> Values:
    """The same for a model of which a part is frozen, so that the two are cut otherwise."""
    model = Net()
    model.inp.requires_grad_(False)
    for name, param in model.blocks.named_parameters():
        param.requires_grad_("up.weight" not in name)
    return with_average(engine, model)


@program()
def ema_shadow(engine: Engine) -> Values:
    """Averages of p.data in a dict, put in place for an evaluation, and the old ones put back."""
    model, losses = engine.shard(Net()), list[float]()
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def evaluate() -> None:
        for name, p in model.named_parameters():
            shadow[name] = 0.2 * p.data + 0.8 * shadow[name]
        backup = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = shadow[name]
        with torch.no_grad():
            x, y = batches()[0]
            losses.append(engine.mean(mse_loss(model(engine.part(x)), engine.part(y))))
        for name, p in model.named_parameters():
            p.data = backup[name]

    return {**train(engine, model, after_step=evaluate), "averaged": losses}


@program()
def ema_whole(engine: Engine) -> Values:
    """Torch's AveragedModel, whole on every rank, updated where parameters are whole."""
    model = Net()
    averaged = AveragedModel(copy.deepcopy(model))
    engine.shard(model)

    def update() -> None:
        with engine.full_params(model):
            averaged.update_parameters(model)

    values = train(engine, model, after_step=update)
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
    model = engine.shard(Net(depth=2))
    optimizer = Sam(list(model.parameters()))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        mse_loss(model(x), y).backward()
        optimizer.first_step()
        return mse_loss(model(x), y)

    return train(engine, model, optimizer, loss, step=optimizer.second_step)


@program()
def gradient_noise(engine: Engine) -> Values:
    """Gradients changed by hand before the step, and parameters updated without an optimizer."""
    model = engine.shard(Net())

    def change() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).add_(p.detach(), alpha=2e-2)
            p.grad = p.grad.clamp(-1, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad.sign(), alpha=-1e-3)  # type: ignore[union-attr]

    return train(engine, model, before_step=change)


@program()
def weight_penalty(engine: Engine) -> Values:
    """Loss + c * sum(p.pow(2).sum() for p in model.parameters())."""
    model = engine.shard(Net())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = mse_loss(model(x), y)
        penalty = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        return out + 1e-2 * penalty

    return train(engine, model, loss=loss)


@program()
def gradient_hooks(engine: Engine) -> Values:
    """A hook on each parameter halves its gradient; one after accumulation sees it."""
    model, names = engine.shard(Net()), set[str]()
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient: gradient * 0.5)

        def look(param: Tensor, name: str = name) -> None:
            if param.grad is not None:
                names.add(name)

        p.register_post_accumulate_grad_hook(look)
    return {**train(engine, model), "parameters with gradients": len(names)}


@program()
def gradient_penalty(engine: Engine) -> Values:
    """The gradient of the output by the input, in the loss (create_graph=True)."""
    model = engine.shard(Net(outputs=1))

    def loss(rows: Tensor, _: Tensor) -> Tensor:
        x = rows.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        value: Tensor = out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
        return value

    return train(engine, model, loss=loss)
