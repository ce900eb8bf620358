from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from torch import Tensor, nn

from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.train.folder import CHECKPOINTS, RECIPE, RESULTS
from shardwise.train.loop import Outcome, train
from shardwise.train.records import (
    Built,
    Busy,
    Evaluated,
    Finished,
    Placed,
    Prepared,
    Record,
    Sampled,
    Saved,
    Stepped,
)
from shardwise.train.run_logger import RunLogger
from tests.train.tiny import tiny_recipe

FILES = [
    ".lock",
    "checkpoints",
    "config.json",
    "eval_results.json",
    "generation_config.json",
    "loss.png",
    "metrics.jsonl",
    "model.safetensors",
    "recipe.yaml",
    "step.json",
    "tokenizer.cache.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "train_results.json",
]


def run(recipe: Recipe, world: int) -> tuple[list[Record], list[Outcome]]:
    """The records of rank 0, alike on a slow machine, and the outcome of each rank."""
    records: list[Record] = []
    outcomes = threads.run(world, lambda comm: train(recipe, comm, records.append))
    return [record for record in records if not isinstance(record, Busy)], outcomes


Ran = tuple[Recipe, list[Record], list[Outcome]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on one rank."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("alone"))
    return recipe, *run(recipe, 1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on two ranks."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("both"))
    return recipe, *run(recipe, 2)


def losses(records: list[Record]) -> list[float]:
    return [record.loss for record in records if isinstance(record, Stepped | Evaluated)]


def test_every_part_until_the_first_step_says_what_it_is_if_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []

    def busy(_: RunLogger, what: str) -> AbstractContextManager[None]:
        parts.append(what)
        return nullcontext()

    monkeypatch.setattr(RunLogger, "busy", busy)
    run(tiny_recipe(tmp_path), 1)
    assert parts == [
        "looking for the model's files",
        *("reading text", "training the tokenizer", "tokenizing"),
        "building the model",
        "reading the checkpoint",
        "taking the first step",
    ]


def test_a_run_tells_its_story_in_order(both: Ran) -> None:
    _, records, _ = both
    step, evaluated = Stepped, Evaluated
    assert [type(record) for record in records] == [
        *(Prepared, Built, step, step, evaluated, step, step, evaluated, Saved),
        *(Sampled, Placed, Finished),
    ]
    built = records[1]
    assert isinstance(built, Built)
    assert (built.rows, built.micro, built.accumulation, built.ranks) == (12, 1, 6, 2)
    (dtypes,) = built.dtypes
    assert dtypes.startswith(f"{built.parameters:,} stored float32, computed in float32, ")
    steps = [record for record in records if isinstance(record, Stepped)]
    shown = {step.step: step.lr for step in steps}
    assert {shown[step] for step, _ in built.rates} == {rate for _, rate in built.rates}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_world_size_changes_nothing_but_rounding(
    tmp_path: Path, world: int, alone: Ran, both: Ran
) -> None:
    _, by_one, (last, *_) = alone
    records, all_last = both[1:] if world == 2 else run(tiny_recipe(tmp_path), world)
    assert losses(records) == pytest.approx(losses(by_one), rel=1e-5)
    assert {outcome.step for outcome in all_last} == {4}
    evaluations, expected = [outcome.evaluated for outcome in all_last], last.evaluated
    assert len({evaluated.loss for evaluated in evaluations if evaluated}) == 1
    assert evaluations[0]
    assert expected
    assert evaluations[0].unigram_entropy == expected.unigram_entropy
    assert evaluations[0].tokens == expected.tokens


def test_the_folder_holds_the_whole_run(both: Ran) -> None:
    recipe, records, _ = both
    folder = Path(recipe.run.folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert {*FILES} <= {".lock", RECIPE, CHECKPOINTS, *RESULTS}  # all of it is moved to be replaced
    assert read_recipe(folder / "recipe.yaml") == recipe
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    kinds = [json.loads(line)["record"] for line in lines]
    assert kinds == [type(record).__name__.lower() for record in records]


@pytest.mark.prove
def test_the_model_that_is_saved_is_the_one_that_was_validated(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from shardwise.train.data import prepare
    from shardwise.train.folder import Folder
    from shardwise.train.validation import Validation

    recipe = tiny_recipe(tmp_path)
    _, (last, *_) = run(recipe, 3)
    model = AutoModelForCausalLM.from_pretrained(recipe.run.folder)
    data = prepare(recipe, LocalComm(), Folder(Path(recipe.run.folder)))

    again = Validation(data.validation, 7, 1).evaluate(model, LocalComm(), 4)
    assert last.evaluated
    assert again.loss == pytest.approx(last.evaluated.loss, rel=1e-6)


@pytest.mark.prove
def test_training_lowers_the_loss(tmp_path: Path) -> None:
    steps = ("run.steps=40", "run.eval_every=0", "sample.tokens=0", "batch.micro=12")
    records, _ = run(tiny_recipe(tmp_path, *steps), 1)
    first, *_, last = [record for record in records if isinstance(record, Stepped)]
    assert last.loss < first.loss - 1.0
    assert sum(isinstance(record, Evaluated) for record in records) == 1


def test_another_run_in_the_same_folder_is_refused_unless_it_may(tmp_path: Path) -> None:
    first, _ = run(tiny_recipe(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"holds an earlier run .* run\.seed was 0 and is 1"):
        run(tiny_recipe(tmp_path, "run.seed=1"), 1)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is never"):
        run(tiny_recipe(tmp_path, "checkpoint.resume=never"), 1)
    second, _ = run(tiny_recipe(tmp_path, "run.overwrite=true"), 1)
    assert losses(second) == losses(first)


def test_a_run_that_diverges_says_where_and_what_to_do(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "optimizer.lr=1e30", "optimizer.warmup=0", "run.steps=9")
    with pytest.raises(ShardwiseError, match=r"step \d: .* norm nan.* lower optimizer\.lr"):
        run(recipe, 2)


def test_what_is_not_finite_at_the_first_step_is_no_fault_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weight: Tensor, *_: object) -> None:
        nn.init.constant_(weight, math.nan)

    monkeypatch.setattr("shardwise.train.decoder._draw", broken)
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ShardwiseError, match=r"step 1: .* ends; nor were those that it began with"):
        run(recipe, 1)


def test_only_rank_0_speaks(tmp_path: Path) -> None:
    speakers: list[int] = []
    recipe = tiny_recipe(tmp_path)
    threads.run(3, lambda comm: train(recipe, comm, lambda _: speakers.append(comm.rank)))
    assert set(speakers) == {0}
