"""Models that change while they train: frozen and thawed, written in forward, compiled, copied."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import SGD, AdamW

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import Net, batches
from benchmarks.programs.program import Values, of_rank, program, train
from benchmarks.training import trained


@program()
def gan_that_toggles(engine: Engine) -> Values:
    """A GAN whose discriminator is frozen while the generator learns."""
    generator, judge = engine.shard(Net(4, 7)), engine.shard(Net(7, 1))
    optimizers = [SGD(net.parameters(), lr=0.1) for net in (generator, judge)]
    losses = []
    for x, _ in of_rank(engine, batches()):
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        fake = judge(generator(x[:, :4]))
        loss = binary_cross_entropy_with_logits(fake, torch.ones_like(fake))
        loss.backward()
        optimizers[0].step()
        judge.requires_grad_(True)
        optimizers[1].zero_grad()
        real, fake = judge(x), judge(generator(x[:, :4]).detach())
        loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = loss + binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        loss.backward()
        optimizers[1].step()
        losses.append(engine.mean(loss))
    return {"losses": losses, "generator": engine.whole(generator), "judge": engine.whole(judge)}


@program()
def unfreezing(engine: Engine) -> Values:
    """A model whose blocks are thawed one by one, with one optimizer over all of them."""
    model, history = Net(), []
    model.blocks.requires_grad_(False)
    engine.shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for block in reversed(model.blocks):
        history.append(train(engine, model, optimizer))
        block.requires_grad_(True)
    history.append(train(engine, model, optimizer))
    return {"history": history}


@program()
def frozen_for_a_reference(engine: Engine) -> Values:
    """requires_grad off for a forward pass under no_grad, and on again."""
    model, references = engine.shard(Net()), list[float]()

    def refer() -> None:
        model.out.requires_grad_(False)
        with torch.no_grad():
            references.append(engine.mean(model(engine.part(batches()[0][0])).mean()))
        model.out.requires_grad_(True)

    return {**train(engine, model, after_step=refer), "references": references}


@program()
def frozen_below(engine: Engine) -> Values:
    """Gradients through a frozen model to one that trains before it."""
    model, judge = Net(7, 7), Net(7, 3)
    judge.requires_grad_(False)
    engine.shard(model)
    engine.shard(judge)
    return train(engine, model, loss=lambda x, y: mse_loss(judge(model(x)), y))


class Clamped(Net):
    """Writes its parameters in forward: a temperature that is clamped, a target that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.target = nn.Parameter(torch.zeros(12, 7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0.5, 1.0)
        with torch.no_grad():
            self.target.lerp_(self.inp.weight, 0.2)
        out: Tensor = super().forward(x) * self.scale
        return out


@program()
def written_in_forward(engine: Engine) -> Values:
    """Parameters written in forward: a clamped scale, a momentum target (MoCo)."""
    model = engine.shard(Clamped())
    return train(engine, model, SGD(trained(model), lr=0.5))


class Autoencoder(nn.Module):
    """Is trained by a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.decoder = Net(7, 8), nn.Linear(8, 4), Net(4, 7)

    def loss(self, x: Tensor) -> Tensor:
        return mse_loss(self.decoder(self.mean(torch.tanh(self.encoder(x)))), x)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)


@program()
def other_method(engine: Engine) -> Values:
    """A model that is trained by model.loss(x), registered as a forward method."""
    model = engine.shard(Autoencoder())
    engine.forward_method(model, "loss")
    return train(engine, model, loss=lambda x, _: model.loss(x))


def compiled(engine: Engine, backend: str, before: bool) -> Values:
    """``torch.compile(model)``, before sharding or after."""
    torch.compiler.reset()
    model = Net(depth=2)
    if before:
        compiled_model = torch.compile(model, backend=backend)
        engine.shard(model)
    else:
        engine.shard(model)
        compiled_model = torch.compile(model, backend=backend)
    return train(engine, model, loss=lambda x, y: mse_loss(compiled_model(x), y))


@program()
def compile_before(engine: Engine) -> Values:
    """torch.compile(model), then sharded."""
    return compiled(engine, "aot_eager", before=True)


@program()
def compile_after(engine: Engine) -> Values:
    """Sharded, then torch.compile(model)."""
    return compiled(engine, "aot_eager", before=False)


@program()
def compile_inductor(engine: Engine) -> Values:
    """Sharded, then torch.compile(model) with inductor."""
    return compiled(engine, "inductor", before=False)


@program()
def compile_blocks(engine: Engine) -> Values:
    """block.compile() for each block, then sharded."""
    torch.compiler.reset()
    model = Net(depth=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train(engine, engine.shard(model))


@program()
def deep_copy(engine: Engine) -> Values:
    """copy.deepcopy(model) while it is sharded: a plain copy."""
    model = engine.shard(Net())
    values = train(engine, model)
    with torch.no_grad():
        return {**values, "copy": copy.deepcopy(model)(batches()[0][0])}


@program()
def initialised_after(engine: Engine) -> Values:
    """Weights initialised anew after sharding, where parameters are whole."""
    model = engine.shard(Net())
    with engine.full_params(model), torch.no_grad():
        torch.manual_seed(3)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
    return train(engine, model)
