"""``shardwise explain``: words, and numbers for a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.cli.other_libraries import without_their_noise
from shardwise.recipe.read import read_recipe
from shardwise.train.memory_estimate import predict
from tests.hf.folders import tiny

RECIPE = "recipes/demo.yaml"


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *arguments])
    out, error = capsys.readouterr()
    assert caught.value.code == 0, error
    return out


def test_without_a_word_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "all-gather" in explain(capsys)


def test_a_word_of_two_parts_needs_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "all", "gather")
    assert "rank 1: gives [3.0, 4.0, 5.0]" in text
    assert "https://" in text


def test_the_bytes_of_a_recipes_model_by_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(explain(capsys, "memory", RECIPE, "--ranks", "8", "--json"))
    assert [row["strategy"] for row in rows] == ["no_shard", "zero1", "shard_grad_op", "full_shard"]
    assert rows[0]["between_steps"] > 7 * rows[3]["between_steps"]
    text = explain(capsys, "memory", RECIPE, "--ranks", "8")
    assert "Decoder, 3,541,248 parameters" in text or "Decoder, " in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json",),
        ("all-gather", "--ranks", "8"),
        ("memory", "--strategy", "zero1"),
        ("step", "--json"),
        ("step", "--accumulation", "2"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *arguments])
    out, error = capsys.readouterr()
    assert not out
    assert " changes nothing of what `shardwise explain" in error


def test_a_mesh_has_at_least_one_rank_in_each_direction(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "memory", "--mesh", "0", "2"])
    assert caught.value.code == 2
    assert "0 is not in the range x>=1" in capsys.readouterr().err


def test_both_ways_to_accumulate_are_beside_the_strategies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("memory", RECIPE, "--ranks", "8", "--accumulation", "4")
    *_, full_shard = json.loads(explain(capsys, *options, "--json"))
    assert full_shard["sent_each"] == 4 * full_shard["sent"] > full_shard["sent_once"]
    assert full_shard["gradients_once"] > 7 * full_shard["gradients_each"]
    text = explain(capsys, *options)
    assert "4 micro-batches in a step: gradients reduced after each, or once" in text
    assert "sharding.sync_each_micro_batch: true" in text


FINE_TUNING = """\
model: {from: HUB, quantization: {bits: 4}}
adapter: {rank: 8}
data: {source: stdlib, context: 16}
optimizer: {name: paged_adamw_8bit, ema: 0.99}
sharding: {strategy: hybrid_full, mesh: [2, 2], precision: bf16, unsharded: 4096}
"""


def test_what_a_recipe_says_is_read_as_train_predicts_it_unless_an_option_says_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(FINE_TUNING.replace("HUB", str(tiny("llama", tmp_path / "hub"))), "utf-8")

    def row(*options: str) -> dict[str, Any]:
        text = explain(capsys, "memory", str(recipe), "--json", *options)
        rows = {row["strategy"]: row for row in json.loads(text)}
        return dict(rows["hybrid_full"])

    known = row()
    with without_their_noise():
        predicted = predict(read_recipe(recipe), 4)
    assert known == asdict(predicted) | {"between_steps": predicted.between_steps}
    other = row("--optimizer", "sgd", "--offload", "optimizer", "--mesh", "1", "2")
    assert other["optimizer"] == 0 < known["optimizer"]
    assert other["in_host"] > known["in_host"] == 0
    assert other["gradients"] == 0 < known["gradients"]
    step = explain(capsys, "step", str(recipe))
    assert "hybrid_full (replicate=2 × shard=2) on 4 ranks" in step
    assert step != explain(capsys, "step", str(recipe), "--optimizer", "sgd")  # no blocks of 256
    step = explain(capsys, "step", str(recipe), "--strategy", "hybrid_shard", "--mesh", "1", "2")
    assert "hybrid_shard (replicate=1 (one copy) × shard=2) on 2 ranks" in step


def test_of_4_bit_layers_the_parameters_are_counted_and_not_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    text = FINE_TUNING.replace("HUB", str(tiny("llama", tmp_path / "hub")))
    titles = []
    for name, recipe in (("4", text), ("16", text.replace(", quantization: {bits: 4}", ""))):
        (tmp_path / f"{name}.yaml").write_text(recipe, "utf-8")
        table = explain(capsys, "memory", str(tmp_path / f"{name}.yaml"), "--optimizer", "adamw")
        titles.append(table.splitlines()[0])
        assert ("where 4-bit weights are made whole" in table) is (name == "4")
    assert titles[0] == titles[1]


def test_hybrids_are_in_the_table_and_have_events_where_a_mesh_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = explain(capsys, "memory", "--mesh", "2", "2")
    assert "rank 0 of 4" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.count("KiB") > 3}
    assert list(rows)[-3:] == ["hybrid_shard_zero2", "hybrid_shard", "hybrid_full"]
    assert rows["hybrid_shard"][1:8:2] == ["16.0", "16.0", "32.0", "64.0"]
    assert rows["hybrid_full"][1:8:2] == ["16.0", "8.0", "16.0", "40.0"]
    text = explain(capsys, "step", "--strategy", "hybrid_full", "--mesh", "2", "2")
    assert "hybrid_full (replicate=2 × shard=2) on 4 ranks" in text
    assert "update   0  # all-gather over replicate, 8.0 KiB, sends 4.0 KiB" in text
    assert "average  0  # reduce-scatter over replicate, 8.0 KiB, sends 4.0 KiB" in text


def test_what_is_in_host_memory_has_a_column_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "4", "--offload", "optimizer")
    text = explain(capsys, "memory", *options)
    row = next(line.split() for line in text.splitlines() if line.startswith("full_shard"))
    assert row[1:11:2] == [
        "8.0",
        "0",
        "0",
        "8.0",
        "32.0",
    ]  # a copy of the shard stays on the device
    assert "32.0 KiB" in text
    assert "in host    what lies in host memory instead" in text
    text = explain(capsys, "step", *options)
    assert "full_shard with optimizer state in host memory on 4 ranks" in text
    assert "load    0  # to the device, 4.0 KiB: the optimizer has stepped" in text


def test_the_events_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "step", "--strategy", "shard_grad_op")
    assert text.startswith("# one step (train) of shard_grad_op on 2 ranks: 2 gathers, 2 reduces")
