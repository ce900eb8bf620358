"""Saving by some ranks and resuming by others, drawn from a seed, with a fault between them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.errors import CheckpointError
from tests.programs.processes import Verdict, difference, fill
from tests.programs.random_programs import STRATEGIES

X = (torch.arange(24.0).reshape(4, 6) * 0.37).cos()
Optimizer = torch.optim.Optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02),
}


def _remove(file: Path, _: random.Random) -> None:
    file.unlink()


def _cut(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(max(1, file.stat().st_size))])


def _flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _empty(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


FAULTS = {"remove": _remove, "cut": _cut, "flip": _flip, "empty": _empty}


@dataclass(frozen=True)
class Case:
    """One case; its text is what a failure prints, and ``run(Case(…))`` runs it alone."""

    seed: int
    worlds: tuple[int, int]
    strategies: tuple[str, str]
    optimizer: str
    grouped: bool
    wrapped: bool  # are units chosen otherwise when it is loaded?
    fault: str  # "" = none
    asynchronous: bool


def case(seed: int) -> Case:
    draw = random.Random(seed)
    return Case(
        seed=seed,
        worlds=(draw.randint(1, 4), draw.randint(1, 4)),
        strategies=(draw.choice(STRATEGIES), draw.choice(STRATEGIES)),
        optimizer=draw.choice(list(OPTIMIZERS)),
        grouped=draw.random() < 0.5,
        wrapped=draw.random() < 0.3,
        fault=draw.choice(["", "", *FAULTS]),
        asynchronous=draw.random() < 0.3,
    )


def model(draw: random.Random) -> nn.Module:
    """Linear layers of odd sizes, some frozen, tied or in another dtype."""
    parts: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        hidden = draw.choice((1, 5, 13, 64))
        first, second = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        kind = draw.choice(("plain", "frozen", "tied", "bfloat16", "buffer"))
        if kind == "frozen":
            first.requires_grad_(False)
        elif kind == "tied":
            second = nn.Linear(6, 6)
            first = nn.Linear(6, 6)
            second.weight = first.weight
        elif kind == "buffer":
            first.register_buffer("count", torch.tensor(7))
        parts.append(nn.Sequential(first, nn.Tanh(), second))
    return fill(nn.Sequential(*parts))


def start(case: Case, which: int, comm: Comm) -> tuple[sw.Sharded, Optimizer]:
    net = model(random.Random(case.seed))
    wrap = sw.wrap.whole() if which and case.wrapped else None
    sharded = sw.shard(net, case.strategies[which], wrap=wrap, comm=comm)
    groups: Any = net.parameters()
    if case.grouped:
        groups = [
            {"params": [p for p in net.parameters() if p.ndim > 1], "lr": 0.03},
            {"params": [p for p in net.parameters() if p.ndim < 2]},
        ]
    return sharded, OPTIMIZERS[case.optimizer](groups)


def seen(sharded: sw.Sharded, optimizer: Optimizer) -> list[Any]:
    """Whole weights and optimizer state, by name."""
    state = sharded.optimizer_state_dict(optimizer)["state"]
    flat = {
        f"{n}.{key}": torch.as_tensor(v) for n, held in state.items() for key, v in held.items()
    }
    weights: dict[str, Tensor] = sharded.model.state_dict()
    return [
        ("weights", {name: value.clone() for name, value in weights.items()}),
        ("state", {name: value.clone() for name, value in flat.items()}),
    ]


def save(case: Case, folder: Path, comm: Comm) -> dict[str, list[Any]]:
    """Train, and save twice."""
    sharded, optimizer = start(case, 0, comm)
    saved = {}
    for step in (1, 2):
        sharded.model(X + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        path = folder / f"step-{step}"
        if case.asynchronous:
            saving = sharded.save_async(path, optimizer, sw.Training(step=step))
            assert saving is not None
            saving.wait()
        else:
            sharded.save(path, optimizer, sw.Training(step=step))
        saved[path.name] = seen(sharded, optimizer)
    return saved


def resume(case: Case, folder: Path, comm: Comm) -> tuple[str, list[Any]]:
    sharded, optimizer = start(case, 1, comm)
    with torch.no_grad():
        for param in sharded.model.parameters():
            param.mul_(0.5)
    report = sharded.resume(folder, optimizer)
    return "" if report is None else report.path.name, seen(sharded, optimizer)


def run(case: Case, folder: Path) -> Verdict:
    """Save, damage, resume, and compare with what was saved."""
    shutil.rmtree(folder, ignore_errors=True)
    saved = threads.run(case.worlds[0], lambda comm: save(case, folder, comm))[0]
    draw = random.Random(case.seed)
    if case.fault:
        files = sorted(path for path in (folder / "step-2").rglob("*") if path.is_file())
        FAULTS[case.fault](draw.choice(files), draw)
    try:
        ranks = threads.run(case.worlds[1], lambda comm: resume(case, folder, comm))
    except CheckpointError as error:
        return Verdict("refused", str(error)) if case.fault else Verdict("wrong", str(error))
    except Exception as error:  # noqa: BLE001 - anything else is what this is looking for
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    for name, values in ranks:
        if name not in saved or (not case.fault and name != "step-2"):
            return Verdict("wrong", f"it resumed from {name!r}")
        if (what := difference(saved[name], values, 0.0)) is not None:
            return Verdict("wrong", what)
    return Verdict("equal")
