"""``shardwise explain``: words with numbers, bytes by strategy, and the events of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from textwrap import wrap
from typing import Any

import click

from shardwise.cli.models import named_model
from shardwise.cli.tables import table
from shardwise.explain.memory import Kept, table_of
from shardwise.explain.words import Word, find, words
from shardwise.offload import Offload
from shardwise.printed import size
from shardwise.setup import order
from shardwise.tracing.blueprint import draw

__all__ = ["About", "run_explain"]


@dataclass(frozen=True)
class About:
    """What the command was asked about; ``strategy`` and ``optimizer`` as their options say."""

    ranks: int = 2
    mesh: tuple[int, int] | None = None  # for hybrids; then ``ranks`` is the product
    strategy: str = "full_shard"
    optimizer: str = "adamw"
    offload: tuple[str, ...] = ()
    as_json: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As for ``shard()``."""
        return {"offload": Offload(**dict.fromkeys(self.offload, True))}


def run_explain(word: str | None, model: str | None, about: About) -> None:
    """Print what was asked for."""
    if word is None:
        lines = _list()
    elif word == "memory":
        lines = _memory(model, about)
    elif word == "step":
        lines = _step(model, about)
    else:
        lines = _word(find(word if model is None else f"{word} {model}"))
    click.echo("\n".join(lines))


def _list() -> Iterator[str]:
    for word in words().values():
        yield f"{word.name:<18} {', '.join(word.also)}"
    yield f"{'memory MODEL':<18} what each strategy keeps on a rank, and sends"
    yield f"{'step MODEL':<18} the events of one step"


def _word(word: Word) -> Iterator[str]:
    yield from wrap(word.text, 96)
    if word.demo:
        from shardwise.explain.demos import demonstrate

        yield ""
        yield from (f"    {line}" for line in demonstrate(word.demo))
    yield ""
    yield from word.links


def _memory(model: str | None, about: About) -> Iterator[str]:
    named = named_model(model)
    ranks = prod(about.mesh) if about.mesh else about.ranks
    rows = table_of(named.model, (0, ranks), about.optimizer, about.mesh, **about.options)
    if about.as_json:
        yield json.dumps([asdict(row) | {"between_steps": row.between_steps} for row in rows])
        return
    numel = sum(param.numel() for param in named.model.parameters())
    yield (
        f"{type(named.model).__name__}, {numel:,} parameters, {about.optimizer}, "
        f"rank 0 of {ranks}: bytes between steps, and of a step"
    )
    yield ""
    head = ["strategy", "parameters", "gradients", "optimizer", "together", "gathered", "sent"]
    if about.offload:
        head.insert(5, "in host")
    lines = [_row(row, bool(about.offload)) for row in rows]
    yield from table(lines, [*head, "gathers", "reduces"])
    yield ""
    yield "together   what lies there between steps, before gradients are dropped"
    if about.offload:
        yield "in host    what lies in host memory instead; the columns before it are of the device"
    yield "gathered   full parameters at most at a time within a step, besides"
    yield "gathers    all-gathers in the forward + backward pass; reduces: reduce-scatters"


def _row(row: Kept, offloads: bool) -> list[str]:
    nbytes = [
        row.parameters + row.joined,
        row.gradients,
        row.optimizer,
        row.between_steps,
        *([row.in_host] if offloads else []),
        row.gathered,
    ]
    gathers = [row.calls.get(f"{phase} gather", 0) for phase in ("forward", "backward")]
    counts = ["{} + {}".format(*gathers), str(row.calls.get("reduce", 0))]
    return [row.strategy, *map(size, nbytes), size(row.sent), *counts]


def _step(model: str | None, about: About) -> Iterator[str]:
    module = named_model(model).model
    ranks = prod(about.mesh) if about.mesh else about.ranks
    blueprint = draw(module, about.strategy, ranks=(0, ranks), mesh=about.mesh, **about.options)
    yield str(blueprint.schedule(order.guess(module, blueprint.units.unit_names)))
