"""Which options go together: one table, which is run here and printed in docs/support.md.

A plain run of the suite takes as many combinations as show every value, ``make prove`` every three
of the first seven axes together, and every two of all. A combination trains as ``no_shard`` does
with the same precision, optimizer and policy for buffers and defaults for the rest, which
trains as a plain process does. Or it is refused, with the sentence of the table.

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
from tests.hf.quantising import updating_alone
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
    return updating_alone(optimizer(sharded.model.parameters(), min_8bit_size=256, **ADAMW))  # type: ignore[no-any-return]


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
    "unsharded": {
        "none": Value("the default"),
        "all": Value("unsharded=2**30", {"unsharded": 2**30}),
    },
    "precision": {
        "fp32": Value("the default"),
        "bf16": Value(
            "sw.Precision(param_dtype=torch.bfloat16)", in_precision(param_dtype=BF16), None, 2e-2
        ),
        "bf16 wire": Value(
            "sw.Precision(reduce_dtype=torch.bfloat16)", in_precision(reduce_dtype=BF16), None, 4e-2
        ),
        "fp16": Value(
            "sw.Precision(param_dtype=torch.float16)", in_precision(param_dtype=FP16), None, 2e-2
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
        "optimizer": Value('offload="optimizer"', {"offload": "optimizer"}),
        "all": Value('offload="everything"', {"offload": "everything"}),
    },
    "optimizer": {
        "SGD": Value("torch.optim.SGD", {}, of_params(SGD, lr=0.1, momentum=0.9)),
        "AdamW": Value("torch.optim.AdamW", {}, of_params(AdamW, **ADAMW)),
        "flat AdamW": Value("sw.optim.AdamW", {}, of_handle(sw.optim.AdamW, **ADAMW)),
        "8-bit": Value("bitsandbytes.optim.AdamW8bit", {"blocksize": 256}, eight_bits),
        "torch's Muon": Value("torch.optim.Muon", {}, of_matrices(Muon, lr=0.01)),
        "Muon": Value("sw.optim.Muon", {}, of_handle(sw.optim.Muon, lr=0.01), 1e-2),
        "Adafactor": Value("torch.optim.Adafactor", {}, of_params(Adafactor)),
    },
    "buffers": {
        "local": Value("the default"),
        **{
            name: Value(f'buffers="{name}"', {"buffers": name}) for name in ("broadcast", "average")
        },
    },
    "bucketing": {
        "block": Value("the default"),
        **{name: Value(f'bucketing="{name}"', {"bucketing": name}) for name in ("layer", "none")},
    },
    "prefetch": {
        "pre": Value("the default"),
        "post": Value('sw.Prefetch(when="post")', {"prefetch": sw.Prefetch(when="post")}),
        "forward": Value("sw.Prefetch(forward=2)", {"prefetch": sw.Prefetch(forward=2)}),
        "off": Value("sw.Prefetch(backward=0)", {"prefetch": sw.Prefetch(backward=0)}),
    },
}
FIRST = 7  # axes of which any three are run together
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
        {"strategy": ["no_shard", "zero1"], "unsharded": ["all"]},
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


def parts(combination: Combination, size: int, axes: int) -> set[Part]:
    return set(combinations(enumerate(combination[:axes]), size))


def covering(rows: list[Combination], size: int, axes: int = len(AXES)) -> Iterator[Combination]:
    """Rows in which any ``size`` values of the first ``axes`` that occur together in ``rows`` do.

    Always the same; all of them train, or all are refused, as those of ``rows``.
    """
    missing = set().union(*(parts(row, size, axes) for row in rows))
    chance, trains = random.Random(0), refusal(rows[0]) is None
    for part in sorted(missing):
        while part in missing:
            sampled = [dict(enumerate(row)) | dict(part) for row in chance.sample(rows, 20)]
            changed = [tuple(values.values()) for values in sampled]
            fitting = [row for row in changed if (refusal(row) is None) is trains]
            if fitting:  # to compile takes ten times as long as all else, so few rows do
                gain = {
                    row: len(parts(row, size, axes) & missing) - 5 * ("aot_eager" in row)
                    for row in fitting
                }
                yield (best := max(fitting, key=gain.__getitem__))
                missing -= parts(best, size, axes)


def divided(rows: Iterable[Combination]) -> tuple[list[Combination], list[Combination]]:
    """Those that train, and those that are refused."""
    every = list(rows)
    return [r for r in every if refusal(r) is None], [r for r in every if refusal(r) is not None]


VALUES = [list(values) for values in AXES.values()]
ROWS = list(product(*VALUES[:FIRST], *([values[0]] for values in VALUES[FIRST:])))
CHANCE = random.Random(0)
TRAIN, REFUSE = divided(ROWS)
TRAIN_WIDE, REFUSE_WIDE = divided(tuple(map(CHANCE.choice, VALUES)) for _ in range(3000))
SHOWN = {*covering(TRAIN_WIDE, 1)}
QUICK = [row for row in REFUSE_WIDE if "aot_eager" not in row]
SHOWN |= {next(row for row in QUICK if refusal(row) is refused) for refused in REFUSED}
PROVED = {*covering(TRAIN, 3, FIRST), *covering(REFUSE, 3, FIRST)}
PROVED |= {*covering(TRAIN_WIDE, 2), *covering(REFUSE_WIDE, 2)}
PROVED -= SHOWN


# --- they are run ----------------------------------------------------------------------------


def trained(combination: Combination, ranks: int) -> Gradients:
    """Rank 0's whole values after some steps, or the error of ``sw.shard`` or of a step."""
    values = [axis[name] for axis, name in zip(AXES.values(), combination, strict=True)]
    options = {key: option for value in values for key, option in value.options.items()}
    [make] = [value.optimizer for value in values if value.optimizer is not None]
    recipe = Recipe(with_a_buffer, nets.tied_decoder_batch, SGD, steps=STEPS)
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


def with_a_buffer() -> nn.Module:
    """The decoder, and the mean of its last batch's ids, which is another one on each rank."""
    model = nets.tied_decoder()
    model.register_buffer("mean_id", torch.zeros(1))

    def write(module: Any, args: tuple[torch.Tensor]) -> None:
        module.mean_id.fill_(args[0].double().mean())

    model.register_forward_pre_hook(write)
    return model


def on_rank(
    comm: Comm,
    model: nn.Module,
    recipe: Recipe,
    shard: Callable[..., sw.Sharded],
    make: MakeOptimizer,
) -> Gradients:
    sharded = shard(model, comm=comm)
    optimizer = make(sharded)
    scaler = GradScaler("cpu", 1024.0, enabled=sharded.options.precision.param_dtype is FP16)
    for step in range(recipe.steps):
        for batch in recipe.batches(step, comm.rank):
            scaler.scale(recipe.loss(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.state_dict()


@cache
def alone(chosen: Part, ranks: int) -> Gradients:
    """``no_shard`` and defaults, but for these; ``zero1`` where that is refused."""
    combination = dict(enumerate(values[0] for values in VALUES)) | dict(chosen)
    if refusal(tuple(combination.values())):
        combination[0] = "zero1"
    return trained(tuple(combination.values()), ranks)


@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
@pytest.mark.parametrize(
    "combination",
    [*sorted(SHOWN), *(pytest.param(row, marks=pytest.mark.prove) for row in sorted(PROVED))],
    ids=", ".join,
)
def test_a_combination_trains_or_is_refused(combination: Combination) -> None:
    values = [axis[name] for axis, name in zip(AXES.values(), combination, strict=True)]
    ranks = max(value.ranks for value in values)
    if refused := refusal(combination):
        with pytest.raises(refused.error, match=refused.message):
            trained(combination, ranks)
        return
    axes = {"precision", "optimizer", "buffers"}
    part = [(axis, combination[axis]) for axis, name in enumerate(AXES) if name in axes]
    expected = alone(tuple(part), ranks)
    tolerance = max(value.tolerance for value in values)
    assert off(trained(combination, ranks), expected, tolerance) == {}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_what_they_are_compared_with_trains_as_a_plain_process_does(name: str, ranks: int) -> None:
    make: Any = {"SGD": partial(SGD, lr=0.1, momentum=0.9), "AdamW": partial(AdamW, **ADAMW)}[name]
    recipe = Recipe(with_a_buffer, nets.tied_decoder_batch, make, steps=STEPS)
    plain = large_batch(recipe, ranks).states[0]
    chosen = {"optimizer": name, "buffers": "average"}  # which is that of one large batch
    parameters = alone(
        tuple((list(AXES).index(axis), value) for axis, value in chosen.items()), ranks
    )
    assert off(parameters, plain, 2e-5) == {}


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
    works = len(TRAIN)
    count = (
        f"{len(ROWS):,} combinations of the first {FIRST} axes: {works:,} train, "
        f"{len(ROWS) - works:,} are refused.\n"
    )
    head = ["axis", "value", *(f"`{name}`" for name in strategies)]
    return "\n".join(
        [count, table(head, matrix), table(["", "refused", "error", "which says"], refusals)]
    )


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == written()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + written() + END + rest.partition(END)[2], "utf-8")
