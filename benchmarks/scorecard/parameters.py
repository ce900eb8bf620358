"""Parameters of every kind, and optimizers on them: pains 6–13 and 26."""

from __future__ import annotations

import copy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.scorecard.case import Case
from benchmarks.scorecard.engines import Engine
from benchmarks.scorecard.nets import WIDTH, Language, Net, Values, batch, seeded, train


class Adapted(nn.Module):
    """A frozen matrix, in 8 bits if quantised, and a trained adapter of rank 3."""

    def __init__(self, quantised: bool) -> None:
        super().__init__()
        frozen = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
        self.scale = nn.Parameter(torch.full((1,), 0.01), requires_grad=False)
        weight = frozen if quantised else frozen.float()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ (self.weight.float() * self.scale) + self.up(self.down(x))
        return out


def trains(engine: Engine, kind: str) -> Values:
    return train(engine, engine.shard(seeded(lambda: Net(partial(changed, kind=kind)))))


def changed(net: Net, kind: str) -> None:
    """The first block becomes unusual."""
    first = net.blocks[0]
    if kind == "dtypes":
        net.blocks[0] = nn.Sequential(first, Narrow())
    if kind in ("frozen", "quantised"):
        net.blocks[0] = Adapted(kind == "quantised")
    if kind == "scalar":
        net.blocks[0] = Scaled()
    if kind == "strides":
        net.blocks[0] = Transposed()


class Narrow(nn.Linear):
    """A parameter in bfloat16, in a unit that is not."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class Scaled(nn.Linear):
    """A module with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Transposed(nn.Module):
    """A module whose weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).T)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tokens(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch(rank, step)
    out: Tensor = model(x)
    return F.cross_entropy(out, (10 * x).long().abs().sum(1) % 31)


def tied(engine: Engine, units: tuple[str, ...] = ()) -> Values:
    model = engine.shard(seeded(lambda: Language(tied=True)), units)
    return train(engine, model, tokens)


class Largest(TorchDispatchMode):
    """Bytes of the largest memory that an operation touches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if type(leaf) in (Tensor, nn.Parameter):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def tables_apart(engine: Engine) -> Values:
    """Embedding and head, which are most of the model, are not gathered together."""
    model = engine.shard(seeded(lambda: Language(tied=False, tokens=999)))
    with Largest() as largest:
        train(engine, model, tokens)
    return {"in one buffer": torch.tensor(float(largest.nbytes > 1.5 * 4 * 999 * WIDTH))}


def clipped(engine: Engine) -> Values:
    """The norm by torch's function, whose result is logged."""
    model = engine.shard(seeded())
    norms: list[Tensor] = []

    def clip() -> None:
        norm = clip_grad_norm_(model.parameters(), 0.05)
        norms.append(torch.as_tensor(norm.item()))

    return train(engine, model, before_update=clip) | {"norms": torch.stack(norms)}


def muon(engine: Engine) -> Values:
    model = engine.shard(seeded(lambda: Net(no_vectors)))
    return train(engine, model, rows_enough, engine.muon(model))


def rows_enough(model: nn.Module, rank: int, step: int) -> Tensor:
    """So many that no singular value of a gradient is nearly zero: it is made 1, in bf16."""
    x = torch.cat([batch(rank, 10 * part + step) for part in range(16)])
    out: Tensor = model(x)
    return F.mse_loss(out, torch.sin(3 * x[:, :5]))


def no_vectors(net: Net) -> None:
    net.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    net.head = nn.Linear(WIDTH, 5, bias=False)


def eight_bits(engine: Engine) -> Values:
    """bitsandbytes, whose state is in blocks of 256 elements."""
    optimizers = import_module("bitsandbytes.optim")  # which exports nothing by name

    def wide(net: Net) -> None:
        net.head = nn.Linear(WIDTH, 515)

    model = engine.shard(seeded(lambda: Net(wide)), blocksize=256)
    return train(engine, model, optimizer=optimizers.AdamW8bit(model.parameters(), lr=0.01))


def offloaded(engine: Engine) -> Values:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = engine.shard(seeded(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return train(engine, model)


def copied(engine: Engine) -> Values:
    """An average of the weights, begun from a deep copy."""
    model = engine.shard(seeded())
    train(engine, model)
    twin = copy.deepcopy(model)
    return {name: value.detach() for name, value in twin.state_dict().items()}


def adamw(engine: Engine) -> Values:
    model = engine.shard(seeded())
    return train(engine, model, optimizer=AdamW(model.parameters(), 0.01, eps=1e-4))


TIED = ("[Ss]hared|tied",)
CASES = (
    Case("22", "embedding and head are never in one buffer", tables_apart),
    Case("6", "two trained dtypes in a unit", partial(trains, kind="dtypes"), ("dtype",)),
    Case("7", "a frozen matrix and adapters in a unit", partial(trains, kind="frozen")),
    Case("8", "the same, with int8 weights", partial(trains, kind="quantised"), ("int8|dtype",)),
    Case("9", "tied weights, units by default", tied, TIED),
    Case("9", "tied weights in two units", partial(tied, units=("embed", "head")), TIED),
    Case("11", "torch's clip_grad_norm_, and its norm", clipped, ("clip_grad_norm_",)),
    Case("12", "Muon", muon, ("Muon",), tolerance=3e-2),
    Case("12", "AdamW in 8 bits", eight_bits, ("8bit|bitsandbytes",)),
    Case("13", "CPU offload", offloaded),
    Case("26", "a scalar parameter", partial(trains, kind="scalar"), ("scalar",)),
    Case("26", "a transposed parameter", partial(trains, kind="strides"), ("contiguous",)),
    Case("26", "a deep copy, as for an average of weights", copied, ("copy",)),
)  # fmt: skip
