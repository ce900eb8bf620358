"""``shardwise explain``: words with numbers, bytes by strategy, and the events of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from itertools import zip_longest
from math import prod
from textwrap import wrap
from typing import Any

import click

from shardwise.cli.models import Named, named_model
from shardwise.cli.other_libraries import without_their_noise
from shardwise.cli.tables import table
from shardwise.doctor.accumulation import Accumulated, accumulated
from shardwise.doctor.words import Word, find, words
from shardwise.errors import ConfigError
from shardwise.hf.preparation import packed_elements, whole_weights
from shardwise.plan import order
from shardwise.plan.bytes import Kept, blueprints, table_of
from shardwise.plan.draw import draw
from shardwise.plan.printed import size
from shardwise.train.optimizer import blocksize_of

UNUSED = {"memory": {"strategy"}, "step": {"accumulation", "json"}}  # options; a word uses none


@dataclass(frozen=True)
class About:
    """Arguments of the command; ``None`` and ``()``: as a recipe says."""

    ranks: int | None = None
    mesh: tuple[int, int] | None = None  # for hybrids
    strategy: str | None = None
    optimizer: str | None = None
    offload: str | None = None
    accumulation: int | None = None  # micro-batches of a step
    as_json: bool = False

    def of(self, named: Named) -> tuple[str, dict[str, Any]]:
        """The optimizer, and the arguments of ``shard()``: as given, as a recipe says, or usual."""
        optimizer = self.optimizer or named.optimizer
        usual = {"strategy": "full_shard", "mesh": None, "offload": "none"}
        own = {"strategy": self.strategy, "mesh": self.mesh, "offload": self.offload}
        given = {name: value for name, value in own.items() if value}
        blocksize = {"blocksize": blocksize_of(optimizer)}
        return optimizer, {**usual, **named.arguments, **given, **blocksize}

    def refuse_unused(self, word: str | None) -> None:
        """Raises ``ConfigError`` for an option that changes nothing of what is said of ``word``."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name.removeprefix("as_") for name, value in own.items() if value}
        if unused := sorted(given & UNUSED.get(word or "", given)):
            command = f"shardwise explain {word or ''}".rstrip()
            raise ConfigError(
                f"--{unused[0]} changes nothing of what `{command}` says. Leave it out; --help "
                "says what it is of."
            )

    def world(self, mesh: tuple[int, int] | None) -> int:
        """The number of ranks."""
        return self.ranks or prod(mesh or (2,))


def run_explain(word: str | None, model: str | None, about: About) -> None:
    """Print what was asked for."""
    about.refuse_unused(word)
    if word is None:
        lines = _list()
    elif word == "memory":
        lines = _memory(model, about)
    elif word == "step":
        lines = _step(model, about)
    else:
        lines = _word(find(word if model is None else f"{word} {model}"))
    with without_their_noise():
        click.echo("\n".join(lines))


def _list() -> Iterator[str]:
    for word in words().values():
        yield f"{word.name:<18} {', '.join(word.also)}"
    yield f"{'memory MODEL':<18} what each strategy keeps on a rank, and sends"
    yield f"{'step MODEL':<18} the events of one step"


def _word(word: Word) -> Iterator[str]:
    yield from wrap(word.text, 96)
    if word.demo:
        from shardwise.doctor.demos import demonstrate

        yield ""
        yield from (f"    {line}" for line in demonstrate(word.demo))
    yield ""
    yield from word.links


def _memory(model: str | None, about: About) -> Iterator[str]:
    named = named_model(model)
    optimizer, arguments = about.of(named)
    del arguments["strategy"]  # each has a row
    ranks, offloads = about.world(arguments["mesh"]), arguments["offload"] != "none"
    rows, ways = table_of(named.model, (0, ranks), optimizer, **arguments), list[Accumulated]()
    if about.accumulation:
        drawn = blueprints(named.model, (0, ranks), **arguments)
        ways = [accumulated(named.model, blueprint, about.accumulation) for blueprint in drawn]
    if about.as_json:
        both = zip_longest(rows, ways)
        yield json.dumps(
            [
                asdict(row) | {"between_steps": row.between_steps} | (asdict(way) if way else {})
                for row, way in both
            ]
        )
        return
    numel = sum(param.numel() for param in named.model.parameters()) + packed_elements(named.model)
    yield (
        f"{type(named.model).__name__}, {numel:,} parameters, {optimizer}, "
        f"rank 0 of {ranks}: bytes between steps, and of a step"
    )
    yield ""
    head = ["strategy", "parameters", "gradients", "optimizer", "together", "gathered", "buckets"]
    if offloads:
        head.insert(5, "in host")
    lines = [_row(row, offloads) for row in rows]
    yield from table(lines, [*head, "sent", "gathers", "reduces"])
    yield ""
    yield "together   what lies there between steps, before gradients are dropped"
    if offloads:
        yield "in host    what lies in host memory instead; the columns before it are of the device"
    yield "gathered   full parameters at most at a time within a step, besides"
    if whole := whole_weights(named.model):
        yield f"           and {size(whole)} on a CPU, where 4-bit weights are made whole in turn"
    yield "buckets    gradients at most at a time: a unit's that are written, another's that travel"
    yield "gathers    all-gathers in the forward + backward pass; reduces: reduce-scatters"
    if about.accumulation:
        yield from _ways(ways, about.accumulation)


def _ways(ways: list[Accumulated], micro_batches: int) -> Iterator[str]:
    yield ""
    yield f"{micro_batches} micro-batches in a step: gradients reduced after each, or once"
    yield ""
    head = ["strategy", "sent: each", "once", "gradients: each", "once"]
    yield from table([[way.strategy, *map(size, astuple(way)[1:])] for way in ways], head)
    yield ""
    yield "sent       by this rank in the step; gradients: what lies there between micro-batches"
    yield "each       sharded.accumulate(last=True), sharding.sync_each_micro_batch: true"
    yield "once       sharded.accumulate(last=False) up to the last one, the default of recipes"


def _row(row: Kept, offloads: bool) -> list[str]:
    nbytes = [
        row.stored,
        row.gradients,
        row.optimizer,
        row.between_steps,
        *([row.in_host] if offloads else []),
        row.gathered,
        row.buckets,
    ]
    gathers = [row.calls.get(f"{phase} gather", 0) for phase in ("forward", "backward")]
    counts = ["{} + {}".format(*gathers), str(row.calls.get("reduce", 0))]
    return [row.strategy, *map(size, nbytes), size(row.sent), *counts]


def _step(model: str | None, about: About) -> Iterator[str]:
    named = named_model(model)
    _, arguments = about.of(named)
    ranks = 0, about.world(arguments["mesh"])
    blueprint = draw(named.model, ranks=ranks, **arguments)
    yield str(blueprint.schedule(order.guess(named.model, blueprint.units.unit_names)))
