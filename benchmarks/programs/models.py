"""Models that are not a straight line: tied, skipped, shared, with odd inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss
from torch.optim import Adam

from benchmarks.programs.engines import Engine
from benchmarks.programs.nets import (
    LanguageModel,
    Net,
    batches,
    language_loss,
    token_batches,
)
from benchmarks.programs.program import Values, program, train


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=1e-2, eps=1e-3)


def language(engine: Engine, head: str) -> Values:
    """Train a language model with this kind of head."""
    model = engine.shard(LanguageModel(head))

    def loss(tokens: Tensor) -> Tensor:
        return language_loss(model(tokens), tokens)

    return train(engine, model, adam(model), loss, token_batches())


@program()
def tied(engine: Engine) -> Values:
    """The head's weight is the embedding's."""
    return language(engine, "tied")


@program()
def tied_by_reading(engine: Engine) -> Values:
    """The model's forward multiplies by self.embed.weight.T."""
    return language(engine, "read")


@program()
def transformers_model(engine: Engine) -> Values:
    """A small GPT-2 of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=29,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = engine.shard(GPT2LMHeadModel(config))

    def loss(tokens: Tensor) -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens).loss
        return value

    return train(engine, model, loss=loss, data=token_batches())


class Skipping(Net):
    """Leaves out one block after another, and returns a dict."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        skipped = self.calls % len(self.blocks)
        self.calls += 1
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            x = x if number == skipped else block(x)
        return {"out": self.out(x), "hidden": [x]}


@program()
def skipped_blocks(engine: Engine) -> Values:
    """Another block is left out in each step; outputs in a dict of lists."""
    model = engine.shard(Skipping())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        hidden: Tensor = out["hidden"][0]
        return mse_loss(out["out"], y) + hidden.pow(2).mean()

    return train(engine, model, adam(model), loss, batches(6))


class Repeating(Net):
    """Uses its first block three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (self.blocks[0], *self.blocks, self.blocks[0]):
            x = block(x)
        out: Tensor = self.out(x)
        return out


@program()
def repeated_block(engine: Engine) -> Values:
    """One block is used three times in a forward pass."""
    return train(engine, engine.shard(Repeating()))


@program()
def without_some_gradients(engine: Engine) -> Values:
    """A loss on a feature alone in every second step: what lies behind it has no gradient."""
    model, features = Net(), list[Tensor]()
    model.blocks[0].register_forward_hook(lambda *call: features.append(call[2]))
    engine.shard(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return mse_loss(out, y) if len(features) % 2 else features[-1].pow(2).mean()

    return train(engine, model, adam(model), loss, batches(6))


class Lin(torch.autograd.Function):
    """A linear function that saves its weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        return g @ weight, g.t() @ x, g.sum(0)


class OwnLinear(nn.Linear):
    """Calls it."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Lin.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


@program()
def own_function(engine: Engine) -> Values:
    """An autograd.Function that saves a weight."""
    model = Net()
    for block in model.blocks:
        block.up = OwnLinear(12, 24)
    return train(engine, engine.shard(model))


@program()
def odd_shapes(engine: Engine) -> Values:
    """Scalars, empty and odd parameters, dimensions that the ranks do not divide."""
    model = Net(depth=2, width=5)
    for block in model.blocks:
        block.register_parameter("temperature", nn.Parameter(torch.tensor(1.5)))
        block.register_forward_hook(lambda *call: call[2] * call[0].temperature)
    return train(engine, engine.shard(model))


@program()
def mixed_dtypes(engine: Engine) -> Values:
    """Blocks in float64 in a model in float32."""
    model = Net(depth=2)
    model.blocks.double()
    model.inp.register_forward_hook(lambda *call: call[2].double())
    model.blocks[-1].register_forward_hook(lambda *call: call[2].float())
    return train(engine, engine.shard(model))


@program()
def frozen_within_a_unit(engine: Engine) -> Values:
    """Some parameters of each block are frozen (adapters)."""
    model = Net()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return train(engine, engine.shard(model))


@program()
def sparse_gradients(engine: Engine) -> Values:
    """nn.Embedding(sparse=True) with SGD."""
    model = LanguageModel()
    model.embed.sparse = True
    engine.shard(model)

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return train(engine, model, loss=loss, data=token_batches())
