"""The fine-tuning benchmark: its pairs, its rows, its tables, and all of it on a tiny base."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.finetune.engines import Samples
from benchmarks.finetune.measure import Run
from benchmarks.finetune.pairs import EVERY, pairs, write_pairs
from benchmarks.finetune.run import check, side_table, step_seconds
from benchmarks.finetune.setup import LongPrompts, Setup
from benchmarks.harness.report import MIB
from shardwise.recipe.data_config import BatchConfig
from shardwise.train.batches import Batches
from shardwise.train.packed import Examples, SampleRows

MODULE = '''
def double(x):
    """Twice x."""
    return 2 * x

def plain(x):
    return x

def empty():
    """Only a docstring."""
'''


def test_a_pair_is_a_docstring_and_the_function_without_it() -> None:
    pair = {"prompt": '"""Twice x."""\n', "completion": "def double(x):\n    return 2 * x"}
    assert list(pairs(MODULE)) == [pair]
    assert list(pairs("print 'of Python 2'")) == []


def test_no_module_is_in_both_splits(tmp_path: Path) -> None:
    texts = [MODULE.replace("double", f"double_{number}") for number in range(2 * EVERY)]
    assert write_pairs(texts, tmp_path) == (2 * EVERY - 2, 2)
    names = [
        json.loads(line)["completion"][len("def ") :].partition("(")[0]
        for line in (tmp_path / "validation.jsonl").read_text().splitlines()
    ]
    assert names == ["double_0", f"double_{EVERY}"]


def test_trainer_deals_out_the_rows_that_our_ranks_take() -> None:
    lengths = np.full(12, 4)
    examples = Examples(np.arange(48, dtype=np.int32), np.ones(48, bool), lengths)
    rows, config = SampleRows(examples, context=4), BatchConfig(rows=4, micro=2)
    ours = [Batches(rows, config, 0, rank, 2) for rank in range(2)]
    trainers = Samples(ours[0], steps=3)
    expected = [ids for step in range(3) for each in ours for ids in each.step(step)[0].ids]
    assert len(trainers) == len(expected) == 12
    for number, ids in enumerate(expected):
        item = trainers[number]
        assert torch.equal(item["input_ids"], ids)
        assert item["shift_labels"].tolist() == [*(ids[1:]).tolist(), -100]


def test_three_quarters_of_long_prompts_have_no_label() -> None:
    setup = LongPrompts("base", "pairs", steps=3, rows=4, context=16, vocabulary=50)
    batches = setup.batches(setup.splits()[0], 0)
    for step in range(3):
        (batch,) = batches.step(step)
        assert (batch.targets != -100).sum(1).tolist() == [4, 4]
        assert batch.ids.max() < 50


def run_of(seconds: float, peak: int, *losses: float) -> Run:
    ends = [seconds * number for number in range(len(losses))]
    return Run(list(losses), ends, ends, peak * MIB, 100 * MIB, 8 * MIB)


def test_a_step_is_as_slow_as_its_slowest_rank() -> None:
    losses = [5.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0]
    ranks = [run_of(1.0, 150, *losses), run_of(2.0, 160, *losses)]
    assert step_seconds(ranks) == [2.0, 2.0]
    slow = [run_of(4.0, 200, *losses)] * 2
    table = side_table({"full_shard": [ranks], "trainer_ddp": [slow]}, Setup("", "", 7, 8, 256))
    assert table.rows[0] == ("full_shard", 1024, 1024, 1024, 3000, 5.0, 3.5, 156.0, 56.0)
    assert table.remarks == ("full_shard ÷ trainer_ddp: 2.00 in tokens/s, 0.58 in memory",)


def test_losses_that_are_not_those_of_ddp_stop_the_run() -> None:
    runs = {"trainer_ddp": [[run_of(1, 1, 3.0, 2.0, 1.0, 0.5)]]}
    check(runs | {"full_shard": [[run_of(1, 1, 3.0, 2.0, 1.000001, 7.0)]]})
    check(runs | {"full_shard_4bit": [[run_of(1, 1, 3.1, 2.1, 1.1)]]})
    with pytest.raises(RuntimeError, match="full_shard on the base: losses"):
        check(runs | {"full_shard": [[run_of(1, 1, 3.0, 2.1, 1.0)]]})


@pytest.mark.prove
@pytest.mark.spawn
def test_the_command_fine_tunes_a_tiny_base_beside_trainer(tmp_path: Path) -> None:
    from tests.hf.folders import tiny

    # For evaluation on CPUs bitsandbytes takes no layer narrower than a block of 64.
    base = tiny("llama", tmp_path / "base", hidden_size=64, intermediate_size=128)
    options = {"base": base, "folder": tmp_path / "run", "steps": 6, "context": 64, "rounds": 1}
    options |= {"vocabulary": 400}
    options |= {"round_steps": 6, "bits": 4, "engines": "full_shard_4bit,trainer_ddp,trainer_fsdp2"}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(main, ["finetune", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output.count("full_shard_4bit ÷ trainer_fsdp2") == 2
    assert "vocabulary 400, 3/4 of the tokens are prompts" in done.output
