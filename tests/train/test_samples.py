from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.cli.format_records import format_record
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import IGNORED, Batches, RowSource
from shardwise.train.data import Data, prepare
from shardwise.train.folder import Folder
from shardwise.train.loop import train
from shardwise.train.records import PreparedSamples, Record, Stepped
from shardwise.train.samples import read_samples, tokenize_split
from shardwise.train.streams import StreamBatches, StreamedRows
from tests.hf.folders import tiny, tiny_tokenizer
from tests.train.tiny import WORDS, tiny_recipe

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{WORDS[i % 12]} {WORDS[i % 7]}:", "completion": f" {WORDS[i % 5]}" * (i % 9 + 1)}
    for i in range(50)
]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return str(path)


def config(folder: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> DataConfig:
    source = written(folder / "a.jsonl", rows)
    return DataConfig.model_validate({"format": "completion", "source": source, **options})


# --- the split -------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.04, 2), (0.01, 1), (0.5, 25)])
def test_the_first_rows_are_for_validation(tmp_path: Path, share: float, count: int) -> None:
    training, validation = read_samples(config(tmp_path, validation=share))
    assert validation.numbers == list(range(1, count + 1))
    assert training.numbers == list(range(count + 1, 51))
    assert [one.texts[0] for one in validation.samples] == [r["prompt"] for r in ROWS[:count]]


def test_a_source_of_its_own_for_validation(tmp_path: Path) -> None:
    other = written(tmp_path / "b.jsonl", ROWS[:3])
    training, validation = read_samples(config(tmp_path, validation_source=other))
    assert (len(training.samples), len(validation.samples)) == (50, 3)


def test_rows_without_an_answer_and_those_that_are_too_long_are_named(tmp_path: Path) -> None:
    rows = [row | {"completion": " "} if i in (1, 9) else row for i, row in enumerate(ROWS)]
    rows[20] = rows[20] | {"prompt": "name " * 60}
    _, validation = read_samples(options := config(tmp_path, rows, validation=0.5, context=32))
    assert [str(out) for out in tokenize_split(validation, tiny_tokenizer(), options).left_out] == [
        "2 rows, empty answer (row 2, …)",
        "1 row, no answer within data.context 32 (row 21)",
    ]


def test_a_wrong_format_is_named_before_any_row(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Q"}]}] * 50
    with pytest.raises(ConfigError, match=r"a\.jsonl: data.format completion reads .* messages\.$"):
        read_samples(config(tmp_path, rows))


@pytest.mark.parametrize(
    ("rows", "context", "message"),
    [
        ([*ROWS[:30], {"prompt": 7, "completion": "x"}], 32, "row 31: column 'prompt' is int"),
        ([row | {"completion": ""} for row in ROWS], 32, "has no samples for training: 40 rows"),
        (ROWS[:1], 32, "has no samples for training: 0 rows .* 1 for validation"),
        (
            [row | {"prompt": "if " * 40} for row in ROWS],
            8,
            "no answer begins within the first 8 tokens .* all 40 of them. Raise data.context.",
        ),
        (ROWS[:2], 500, r"the training split has \d+ tokens, fewer than one row"),
    ],
)
def test_data_that_cannot_be_trained_on(
    tmp_path: Path, rows: list[dict[str, Any]], context: int, message: str
) -> None:
    source = f"data.source={written(tmp_path / 'bad.jsonl', rows)}"
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, 1, source, f"data.context={context}", "data.packing=concatenate")


# --- in a run --------------------------------------------------------------------------------


def recipe(folder: Path, *overrides: str) -> Any:
    source = written(folder / "a.jsonl", ROWS)
    overrides = ("data.format=completion", "data.context=32", *overrides)
    return tiny_recipe(folder, f"data.source={source}", *overrides)


def prepared(folder: Path, world: int, *overrides: str) -> list[Data]:
    read = recipe(folder, *overrides)

    def rank(comm: Comm) -> Data:
        run = Folder(folder) if comm.rank == 0 else None
        return prepare(read, comm, run)

    return threads.run(world, rank)


def every(rows: RowSource | StreamedRows) -> list[int]:
    """All targets, in order."""
    assert not isinstance(rows, StreamedRows)
    targets = rows.take(np.arange(len(rows))).targets
    return [int(target) for target in targets[targets != IGNORED]]


@pytest.mark.parametrize("packing", ["true", "false", "concatenate"])
def test_every_rank_has_the_rows_of_rank_0(tmp_path: Path, packing: str) -> None:
    alone, first, second = [
        *prepared(tmp_path, 1, f"data.packing={packing}"),
        *prepared(tmp_path, 2, f"data.packing={packing}"),
    ]
    assert alone.fingerprint == first.fingerprint == second.fingerprint
    assert every(alone.training) == every(second.training)
    assert every(alone.validation) == every(second.validation)
    assert (first.report is None, second.report) == (False, None)


def test_the_report_counts_every_token(tmp_path: Path) -> None:
    (data,) = prepared(tmp_path, 1, "data.validation=0.1")
    report = data.report
    assert isinstance(report, PreparedSamples)
    assert report.samples == (45, 5)
    assert report.rows[0] * 32 == report.tokens[0] + report.unused[0]
    assert report.trained[0] == len(every(data.training))
    lines = "\n".join(format_record(report))
    assert f"packed 45 samples → {report.rows[0]} blocks of 32 (" in lines
    assert "45 train + 5 validation samples, completion" in lines


def test_the_report_names_columns_that_the_format_does_not_read(tmp_path: Path) -> None:
    """Such as a system prompt beside the messages; empty ones say nothing."""
    rows = [row | {"system": "Be brief.", "history": [], "id": i} for i, row in enumerate(ROWS)]
    (data,) = prepared(tmp_path, 1, f"data.source={written(tmp_path / 'b.jsonl', rows)}")
    assert isinstance(data.report, PreparedSamples)
    assert "not read  system, id: completion has no such column" in format_record(data.report)
    (plain,) = prepared(tmp_path, 1)
    assert isinstance(plain.report, PreparedSamples)
    assert not any(line.startswith("not read") for line in format_record(plain.report))


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("packing", ["true", "false", "concatenate"])
def test_what_the_report_says_is_trained_on_are_the_targets_of_all_rows(
    tmp_path: Path, packing: str, loss_on: str
) -> None:
    """Neither the first token of a sample, which nothing predicts, nor tokens that fill no row."""
    (data,) = prepared(tmp_path, 1, f"data.packing={packing}", f"data.loss_on={loss_on}")
    report = data.report
    assert isinstance(report, PreparedSamples)
    assert report.trained == (len(every(data.training)), len(every(data.validation)))


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_folder_of_the_hub_is_tuned_on_messages(tmp_path: Path, architecture: str) -> None:
    """By its own chat template; one that does not keep packed samples apart is refused."""
    tiny(architecture, tmp_path / "hub")
    roles = {"user": "prompt", "assistant": "completion"}
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": row[name]} for role, name in roles.items()]}
        for row in ROWS
    ]
    path = tmp_path / "tuned.yaml"
    path.write_text(
        f"model: {{from: {tmp_path / 'hub'}}}\n"
        f"data: {{source: {written(tmp_path / 'a.jsonl', chats)}, format: messages, context: 64}}\n"
        "batch: {rows: 4, micro: 2}\noptimizer: {lr: 1e-2, warmup: 0}\nsample: {tokens: 0}\n"
        f"run: {{folder: {tmp_path / 'run'}, steps: 4, device: cpu}}\n"
    )
    losses: list[float] = []

    def emit(record: Record) -> None:
        if isinstance(record, Stepped):
            losses.append(record.loss)

    if architecture == "opt":
        with pytest.raises(ConfigError, match=r"OPTForCausalLM changes its logits by up to"):
            train(read_recipe(path), LocalComm(), emit)
    else:
        threads.run(2, lambda comm: train(read_recipe(path), comm, emit))
        assert losses[-1] < losses[0]


def test_tokens_are_those_of_rows_as_they_are_and_are_counted_on_by_a_resumed_run(
    tmp_path: Path,
) -> None:
    """Without packing a micro-batch is as long as its longest row, and not as ``data.context``."""
    given = ("data.packing=false", "run.steps=4", "sample.tokens=0", "data.context=64")
    whole, steps = recipe(tmp_path, *given), list[Stepped]()

    def run(whole: Recipe) -> None:
        def emit(record: Record) -> None:
            if isinstance(record, Stepped):
                steps.append(record)

        threads.run(2, lambda comm: train(whole, comm, emit))

    run(recipe(tmp_path, *given, "run.steps=2"))
    run(whole)
    data = prepare(whole, LocalComm(), Folder(tmp_path))
    assert not isinstance(data.training, StreamedRows)
    ranks = [Batches(data.training, whole.batch, whole.run.seed, rank, 2) for rank in range(2)]
    each = [sum(b.ids.numel() for r in ranks for b in r.step(step)) for step in range(4)]
    assert [record.tokens for record in steps] == list(accumulate(each))
    assert max(each) < whole.batch.rows * 64
    results = json.loads((Path(whole.run.folder) / "train_results.json").read_text("utf-8"))
    assert results["train_tokens_per_second"] / results[
        "train_samples_per_second"
    ] == pytest.approx(sum(each) / (4 * whole.batch.rows))


# --- streamed --------------------------------------------------------------------------------


def streamed(folder: Path, *overrides: str) -> tuple[str, ...]:
    """A recipe's values: two streams of two windows each, and a tokenizer."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    held_out = written(folder / "b.jsonl", ROWS[:3])
    return (
        f"data.validation_source={held_out}",
        f"tokenizer.source={folder / 'tokenizer'}",
        "tokenizer.end=<|im_end|>",
        "data.streaming.streams=2",
        "data.streaming.shuffle=13",
        *overrides,
    )


Taken = list[tuple[list[int], list[int]]]


def take(source: StreamedRows, world: int, steps: int, positions: Any = ()) -> tuple[Taken, Any]:
    """Ids and targets of every row of ``steps`` global batches, and the positions after them."""
    ranks = [StreamBatches(source, rank, world) for rank in range(world)]
    samples: Taken = []
    for rank in ranks:
        rank.start(positions)
    for _ in range(steps):
        assert not any(rank.ended() for rank in ranks)
        batches = [batch for rank in ranks for batch in rank.step(0)]
        samples += [
            ([i for i in ids if i], [t for t in targets if t != IGNORED])
            for batch in batches
            for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)
        ]
    after = [position for rank in ranks for position in rank.positions()]
    for rank in ranks:
        rank.close()
    return samples, json.loads(json.dumps(after))


@pytest.mark.parametrize("packing", ["true", "false"])
def test_streamed_samples_go_on_at_their_position_at_any_number_of_ranks(
    tmp_path: Path, packing: str
) -> None:
    values = streamed(tmp_path, f"data.packing={packing}", "batch.rows=2")
    (data,) = prepared(tmp_path, 1, *values)
    source = data.training
    assert isinstance(source, StreamedRows)
    whole, _ = take(source, 1, 9)
    first, positions = take(source, 1, 4)
    second, _ = take(source, 2, 5, positions)
    assert first + second == whole


def test_each_streamed_sample_is_trained_on_once_in_an_epoch(tmp_path: Path) -> None:
    (data,) = prepared(tmp_path, 1, *streamed(tmp_path, "data.packing=false", "batch.rows=2"))
    source = data.training
    assert isinstance(source, StreamedRows)
    samples, _ = take(source, 1, 25)
    texts = sorted(source.tokenizer.decode(targets) for _, targets in samples)
    assert texts == sorted(row["completion"] for row in ROWS)  # without the end token's text


@pytest.mark.prove
def test_a_run_on_streamed_samples_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Ranks count together what is trained on, since each knows its own rows only."""

    def losses(world: int) -> list[float]:
        rank_losses: list[float] = []

        def emit(record: Record) -> None:
            if isinstance(record, Stepped):
                rank_losses.append(record.loss)

        values = streamed(tmp_path, f"run.folder={tmp_path}/{world}", "sample.tokens=0")
        streaming = recipe(tmp_path, *values)
        threads.run(world, lambda comm: train(streaming, comm, emit))
        return rank_losses

    assert losses(2) == pytest.approx(losses(1), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.validation_source=null", "name those for validation with data.validation_source"),
        ("data.packing=concatenate", "packing is concatenate, and streamed samples are not"),
        (
            "tokenizer.source=null tokenizer.end=<|endoftext|>",
            "no tokenizer can be trained .* with tokenizer.source",
        ),
        ("data.streaming.streams=null", "streaming has settings and no streams"),
    ],
)
def test_what_cannot_be_streamed(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, 1, *streamed(tmp_path, *change.split()))
