"""Which options go together: one table, which is run here and printed in docs/support.md.

A plain run of the suite takes as many combinations as show every value, ``make prove`` every three
together. A combination trains as ``no_shard`` does alone with the same precision and optimizer,
which trains as a plain process does; or it is refused, with the sentence of the table.

``python -m tests.test_support`` writes the page anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adafactor, AdamW, Muon

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.parity.plain import Gradients, Recipe, large_batch
from tests.parity.sharded import off
from tests.ranks import run_threads

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN, END = "<!-- from tests/test_support.py -->\n", "<!-- to here -->\n"
STEPS = 2
MakeOptimizer = Callable[[sw.Sharded], torch.optim.Optimizer]


@dataclass(frozen=True)
class Value:
    """One value on an axis.

    Attributes:
        shown: what a user writes.
        options: of ``sw.shard``.
        optimizer: from the handle.
        tolerance: of parameters, relative to each tensor's largest magnitude.
        ranks: how many, at least.
    """

    shown: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: MakeOptimizer | None = None
    tolerance: float = 2e-5
    ranks: int = 2


def of_params(make: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda sharded: make(sharded.model.parameters(), **options)


def of_matrices(make: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda sharded: make([p for p in sharded.model.parameters() if p.ndim == 2], **options)


def of_handle(make: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda sharded: make(sharded, **options)


def eight_bits(sharded: sw.Sharded) -> torch.optim.Optimizer:
    optimizer: Any = import_module("bitsandbytes.optim").AdamW8bit
    made: torch.optim.Optimizer = optimizer(sharded.model.parameters(), min_8bit_size=256, **ADAMW)
    return made


def in_precision(**dtypes: Any) -> dict[str, Any]:
    return {"precision": sw.Precision(**dtypes)}


BF16, FP16 = torch.bfloat16, torch.float16
ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-4}

AXES: dict[str, dict[str, Value]] = {
    "strategy": {
        **{
            name: Value(f'"{name}"')
            for name in ("no_shard", "zero1", "shard_grad_op", "full_shard")
        },
        **{
            name: Value(f'"{name}", mesh=(2, 2)', {"mesh": (2, 2)}, ranks=4)
            for name in ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
        },
    },
    "residency": {
        "none": Value("the default"),
        "all": Value("residency=2**30", {"residency": 2**30}),
    },
    "precision": {
        "fp32": Value("the default"),
        "bf16": Value(
            "sw.Precision(compute=torch.bfloat16)", in_precision(compute=BF16), None, 2e-2
        ),
        "bf16 wire": Value(
            "sw.Precision(wire=torch.bfloat16)", in_precision(wire=BF16), None, 4e-2
        ),
        "fp16": Value(
            "sw.Precision(compute=torch.float16)", in_precision(compute=FP16), None, 2e-2
        ),
    },
    "checkpointing": {
        "none": Value("the default"),
        "blocks": Value("activation_checkpointing=True", {"activation_checkpointing": True}),
        "on the host": Value(
            "sw.ActivationCheckpointing(offload=True)",
            {"activation_checkpointing": sw.ActivationCheckpointing(offload=True)},
        ),
    },
    "compile": {
        "none": Value("the default"),
        "aot_eager": Value('compile="aot_eager"', {"compile": "aot_eager"}),
    },
    "offload": {
        "none": Value("the default"),
        "optimizer": Value("sw.Offload(optimizer=True)", {"offload": sw.Offload(optimizer=True)}),
        "all": Value(
            "sw.Offload(parameters=True, gradients=True, optimizer=True)",
            {"offload": sw.Offload(parameters=True, gradients=True, optimizer=True)},
        ),
    },
    "optimizer": {
        "SGD": Value("torch.optim.SGD", {}, of_params(SGD, lr=0.1, momentum=0.9)),
        "AdamW": Value("torch.optim.AdamW", {}, of_params(AdamW, **ADAMW)),
        "flat SGD": Value("sw.optim.SGD", {}, of_handle(sw.optim.SGD, lr=0.1, momentum=0.9)),
        "flat AdamW": Value("sw.optim.AdamW", {}, of_handle(sw.optim.AdamW, **ADAMW)),
        "8-bit": Value("bitsandbytes.optim.AdamW8bit", {"blocksize": 256}, eight_bits),
        "torch's Muon": Value("torch.optim.Muon", {}, of_matrices(Muon, lr=0.01)),
        "Muon": Value("sw.optim.Muon", {}, of_handle(sw.optim.Muon, lr=0.01), 1e-2),
        "Adafactor": Value("torch.optim.Adafactor", {}, of_params(Adafactor)),
    },
}
Combination = tuple[str, ...]  # a value of each axis
Part = tuple[tuple[int, str], ...]  # some of them, each with the number of its axis


@dataclass(frozen=True)
class Refused:
    """Combinations that are an error.

    Attributes:
        when: axis → its values.
        error: what is raised.
        message: what it says, as a pattern.
    """

    when: Mapping[str, Iterable[str]]
    error: type[Exception]
    message: str


SPLIT = [name for name in AXES["strategy"] if name != "no_shard"]
REFUSED = (
    Refused(
        {"strategy": ["no_shard", "zero1"], "residency": ["all"]},
        sw.ConfigError,
        "all full buckets stay in memory",
    ),
    Refused(
        {"strategy": SPLIT, "optimizer": ["torch's Muon"]},
        sw.OptimizerError,
        "it orthogonalises whole matrices",
    ),
    Refused(
        {"strategy": SPLIT, "optimizer": ["Adafactor"]},
        sw.OptimizerError,
        "its factored second moment averages over whole rows and columns",
    ),
)


def refusal(combination: Combination) -> Refused | None:
    values = dict(zip(AXES, combination, strict=True))
    matches = (r for r in REFUSED if all(values[axis] in of for axis, of in r.when.items()))
    return next(matches, None)


# --- which are run ---------------------------------------------------------------------------


def parts(combination: Combination, size: int) -> set[Part]:
    return set(combinations(enumerate(combination), size))


def covering(rows: list[Combination], size: int) -> Iterator[Combination]:
    """Rows in which any ``size`` values that occur together in ``rows`` do; always the same."""
    missing = set().union(*(parts(row, size) for row in rows))
    chance, allowed = random.Random(0), set(rows)
    for part in sorted(missing):
        while part in missing:
            some = [dict(enumerate(row)) | dict(part) for row in chance.sample(rows, 20)]
            fitting = [row for values in some if (row := tuple(values.values())) in allowed]
            if fitting:  # to compile takes ten times as long as all else, so few rows do
                gain = {r: len(parts(r, size) & missing) - 5 * ("aot_eager" in r) for r in fitting}
                yield (best := max(fitting, key=gain.__getitem__))
                missing -= parts(best, size)


ROWS = list(product(*AXES.values()))
TRAIN, REFUSE = (
    [row for row in ROWS if (refusal(row) is None) is trains] for trains in (True, False)
)
SHOWN = {*covering(TRAIN, 1), *covering(REFUSE, 1)}
PROVED = {*covering(TRAIN, 3), *covering(REFUSE, 3)} - SHOWN


# --- they are run ----------------------------------------------------------------------------


def trained(combination: Combination, ranks: int) -> Gradients:
    """Rank 0's whole values after some steps, or the error of ``sw.shard`` or of a step."""
    values = [axis[name] for axis, name in zip(AXES.values(), combination, strict=True)]
    options = {key: option for value in values for key, option in value.options.items()}
    [make] = [value.optimizer for value in values if value.optimizer is not None]
    recipe = Recipe(nets.tied_decoder, nets.tied_decoder_batch, SGD, steps=STEPS)
    models = [recipe.model() for _ in range(ranks)]
    return run_threads(
        ranks,
        lambda comm: on_rank(
            comm,
            models[comm.rank],
            recipe,
            partial(sw.shard, strategy=combination[0], **options),
            make,
        ),
    )[0]


def on_rank(
    comm: Comm,
    model: nn.Module,
    recipe: Recipe,
    shard: Callable[..., sw.Sharded],
    make: MakeOptimizer,
) -> Gradients:
    sharded = shard(model, comm=comm)
    optimizer = make(sharded)
    scaler = GradScaler("cpu", 1024.0, enabled=sharded.options.precision.compute is FP16)
    for step in range(recipe.steps):
        for batch in recipe.batches(step, comm.rank):
            scaler.scale(recipe.loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


@cache
def alone(precision: str, optimizer: str, ranks: int) -> Gradients:
    """``no_shard`` and defaults, but for these."""
    defaults = {axis: next(iter(values)) for axis, values in AXES.items()}
    chosen = {**defaults, "precision": precision, "optimizer": optimizer}
    return trained(tuple(chosen[axis] for axis in AXES), ranks)


@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
@pytest.mark.parametrize(
    "combination",
    [
        *sorted(SHOWN),
        *(pytest.param(row, marks=pytest.mark.prove) for row in sorted(PROVED)),
    ],
    ids=", ".join,
)
def test_a_combination_trains_or_is_refused(combination: Combination) -> None:
    values = [axis[name] for axis, name in zip(AXES.values(), combination, strict=True)]
    ranks = max(value.ranks for value in values)
    if refused := refusal(combination):
        with pytest.raises(refused.error, match=refused.message):
            trained(combination, ranks)
        return
    by_axis = dict(zip(AXES, combination, strict=True))
    expected = alone(by_axis["precision"], by_axis["optimizer"], ranks)
    tolerance = max(value.tolerance for value in values)
    assert off(trained(combination, ranks), expected, tolerance) == {}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_what_they_are_compared_with_trains_as_a_plain_process_does(name: str, ranks: int) -> None:
    make: Any = {"SGD": partial(SGD, lr=0.1, momentum=0.9), "AdamW": partial(AdamW, **ADAMW)}[name]
    recipe = Recipe(nets.tied_decoder, nets.tied_decoder_batch, make, steps=STEPS)
    plain = large_batch(recipe, ranks).states[0]
    assert off(alone("fp32", name, ranks), plain, 2e-5) == {}


# --- the page --------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def cell(strategy: str, axis: str, value: str) -> str:
    """``yes``, or the number of the refusal that this pair alone is enough for."""
    pair: dict[str, str] = {"strategy": strategy, axis: value}
    for number, refused in enumerate(REFUSED, start=1):
        if all(pair.get(name, "") in of for name, of in refused.when.items()):
            return f"refused ({number})"
    return "yes"


def written() -> str:
    """The part of the page that comes from the table."""
    strategies = AXES["strategy"]
    others = {axis: values for axis, values in AXES.items() if axis != "strategy"}
    matrix = [
        [axis, f"`{value.shown}`" if value.shown != "the default" else value.shown]
        + [cell(strategy, axis, name) for strategy in strategies]
        for axis, values in others.items()
        for name, value in values.items()
    ]
    refusals = [
        [
            str(number),
            ", ".join(
                f"{axis}: {' or '.join(AXES[axis][name].shown for name in names)}"
                for axis, names in refused.when.items()
            ),
            f"`{refused.error.__name__}`",
            f"“… {refused.message} …”",
        ]
        for number, refused in enumerate(REFUSED, start=1)
    ]
    works = sum(refusal(row) is None for row in ROWS)
    count = f"{len(ROWS):,} combinations: {works:,} train, {len(ROWS) - works:,} are refused.\n"
    head = ["axis", "value", *(f"`{name}`" for name in strategies)]
    return "\n".join(
        [
            count,
            table(head, matrix),
            table(["", "refused", "error", "which says"], refusals),
        ]
    )


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == written()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + written() + END + rest.partition(END)[2], "utf-8")
