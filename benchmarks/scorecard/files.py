"""What is read and written: pains 14–16."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.scorecard.case import Case
from benchmarks.scorecard.engines import Engine
from benchmarks.scorecard.nets import STEPS, Net, Values, seeded, train


def resumed(engine: Engine) -> Values:
    """Saved in the middle, and taken up by a new model and a new optimizer."""
    model = engine.shard(seeded())
    optimizer = adamw(model)
    train(engine, model, optimizer=optimizer)
    engine.save(model, optimizer)
    model = engine.shard(seeded(lambda: (torch.manual_seed(7), Net())[1]))
    optimizer = adamw(model)
    engine.load(model, optimizer)
    return train(engine, model, optimizer=optimizer, steps=range(STEPS, 2 * STEPS))


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, eps=1e-4)


def to_meta(engine: Engine, shards_there: bool) -> Values:
    """Built without memory, and loaded from a whole state dict that rank 0 alone has."""
    whole = seeded().state_dict() if 0 in engine.ranks else {}
    with torch.device("meta"):
        model = engine.shard(Net()) if shards_there else Net()
    engine.load_whole(model if shards_there else engine.shard(model), whole)
    return train(engine, model)


def exported(engine: Engine) -> Values:
    """The model, saved by transformers' ``save_pretrained``, as a script does at its end."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=31, n_positions=8)
    model = seeded(lambda: GPT2LMHeadModel(config))
    engine.shard(model, units=["transformer.h.0", "transformer.h.1"])
    folder = Path(engine.folder) / type(engine).__name__
    model.save_pretrained(folder / str(engine.ranks[0]))
    engine.whole(model)  # a collective, after which rank 0 has written
    return dict(load_file(folder / "0" / "model.safetensors"))


CASES = (
    Case("14", "rank 0's state dict into a model on meta", partial(to_meta, shards_there=False)),
    Case("14", "the same, sharded under torch.device(meta)", partial(to_meta, shards_there=True)),
    Case("15", "a run saved and resumed, with its optimizer", resumed),
    Case("16", "save_pretrained() of transformers", exported, ("save_pretrained|state",)),
)
