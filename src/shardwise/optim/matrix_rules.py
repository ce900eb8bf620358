"""Parameters that Muon updates, and those that AdamW does: the rules of Keller Jordan and of torch.

Muon is for the matrices of hidden layers. "The input embedding, final output layer, and any
internal gains or biases" (Jordan et al. 2024) go to AdamW; so does what has not two dimensions,
which ``torch.optim.Muon`` refuses. A rule looks at modules and shapes, never at names, and each
choice says its rule.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final, NamedTuple

from torch import nn

from shardwise.plan.units.units import Member

MUON: Final = "muon"
ADAMW: Final = "adamw"


class Choice(NamedTuple):
    """The algorithm that updates a parameter, and the reason."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    rule: str


def choose(model: nn.Module, members: Iterable[Member], named: Container[str]) -> list[Choice]:
    """The choice for each of ``members``; ``named`` are those that the user gives to AdamW."""
    output = _output(model)
    choices = []
    for member in members:
        rule = _exception(member, output, named)
        shape, algorithm = tuple(member.shape), ADAMW if rule else MUON
        choices.append(Choice(member.name, shape, algorithm, rule or "matrix of a hidden layer"))
    return choices


def table(choices: Iterable[Choice]) -> str:
    """A line for each parameter."""
    rows = [("parameter", "shape", "algorithm", "rule")]
    rows += [(c.name, " × ".join(map(str, c.shape)) or "scalar", *c[2:]) for c in choices]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _exception(member: Member, output: nn.Module | None, named: Container[str]) -> str:
    """Say why AdamW updates a parameter; ``""`` if Muon does."""
    if member.name in named:
        return "named in adamw"
    if len(member.shape) != 2:
        return f"{len(member.shape)}-dimensional, no matrix"
    modules = [module for module, _ in member.owners]
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules):
        return "embedding"
    if any(module is output for module in modules):
        return "output layer: the model's last matrix"
    return ""


def _output(model: nn.Module) -> nn.Module | None:
    """The last module with a matrix of its own, in order of registration.

    Sharded parameters have the ``ndim`` of whole ones.
    """
    holders = [m for m in model.modules() if any(p.ndim == 2 for p in m.parameters(recurse=False))]
    return holders[-1] if holders else None
