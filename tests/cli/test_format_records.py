from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from shardwise.cli.format_records import _FORMATTERS, clock, format_record, format_step
from shardwise.train.comparison import Compared, Predicted
from shardwise.train.records import (
    Built,
    Busy,
    Bytes,
    Complete,
    Evaluated,
    Finished,
    LeftOut,
    Placed,
    Prepared,
    Record,
    Replaced,
    Resumed,
    Sampled,
    Saved,
    Stepped,
    Stopped,
    Streamed,
    Warned,
)

PREPARED = Prepared(
    source="/data",
    files=12,
    nbytes=3_400_000,
    left_out=(LeftOut("not text", files=2, places=("/data/a.gif", "/data/b.zip")),),
    capped=True,
    documents=(10, 2),
    tokens=(1_234_567, 4_321),
    rows=(100, 4),
    context=128,
    dropped=(7, 0),
    vocabulary=2048,
    origin="trained on the training split",
    seconds=1.26,
)


def test_the_data_is_accounted_for() -> None:
    assert format_record(PREPARED) == [
        "text      /data: 12 files, first 3.2 MiB (data.max_bytes); more was not read",
        "left out  2 files, not text (/data/a.gif, …)",
        "split     10 train + 2 validation documents, by a hash of their text",
        "tokenizer BPE vocabulary 2,048, trained on the training split",
        "tokens    1,234,567 train + 4,321 validation tokens, last 7 + 0 dropped (1.3 s)",
        (
            "rows      100 train + 4 validation sequences of 128 tokens, packed without document "
            "masking"
        ),
    ]


def test_text_without_a_limit_is_read_whole() -> None:
    one = replace(PREPARED, files=1, capped=False, left_out=(), origin="from the last run")
    assert format_record(one)[0] == "text      /data: 1 file, 3.2 MiB"
    assert format_record(one)[2] == "tokenizer BPE vocabulary 2,048, from the last run"


def test_streams_are_said_to_be_of_one_rank_each() -> None:
    streamed = Streamed("/data", 32, 16, 4, 1000, 20_000_000, 54_321, 2048, "trained on it", 1.26)
    assert format_record(streamed) == [
        "text      /data: 32 shards, read while training",
        (
            "streams   16, rank 0 reads 0 to 3, 4 streams on each of 4 ranks; "
            "each has shards of its own"
        ),
        "shuffle   1,000 documents together, packed into rows",
        "head      first 19.1 MiB (data.max_bytes): 54,321 tokens for validation (1.3 s)",
        "tokenizer vocabulary 2,048, trained on it",
    ]
    uneven = format_record(replace(streamed, shards=3, ranks=16))[1]
    assert uneven == (
        "streams   16, 1 stream on each of 16 ranks; each reads all shards and takes every 16th "
        "document"
    )


def test_what_each_rank_will_keep_is_one_line() -> None:
    (line,) = format_record(Predicted(2_000_000, 300_000, 600_000, 0, 1_500_000))
    assert line == (
        "memory    each rank will keep 2.8 MiB: parameters 1.9 MiB, gradients 293.0 KiB, "
        "optimizer state 585.9 KiB; gathered besides, at most 1.4 MiB, and activations"
    )
    (line,) = format_record(Predicted(0, 0, 0, 7_000_000, 1_500_000))
    assert "optimizer state 0 B; 6.7 MiB in host memory; gathered" in line


def test_the_global_batch_is_a_product_that_can_be_checked() -> None:
    built = Built(31_392, "full_shard", 3, 12, 2, 2, 32, 30, 0.5)
    assert format_record(built) == [
        "model     31,392 parameters, full_shard over 3 ranks",
        "batch     global batch 12 = micro-batch 2 × 2 accumulation steps × 3 ranks",
        "schedule  30 steps of 384 tokens, 0.50 epochs",
        "logits    of the places with a target only, some at a time",
        "tokens/s  over all ranks, in recent steps, without validation and saving",
        "memory    of the process that uses most; on an accelerator, of its device",
        "",
    ]
    warmed = format_record(replace(built, warmup=3, untimed=3))
    assert (
        warmed[2] == "schedule  30 steps of 384 tokens, 0.50 epochs, warm-up in the first 3 (10.0%)"
    )
    assert warmed[4].endswith("in recent steps, without the first 3 steps, validation and saving")
    sent = "31,392 stored float32, computed in bfloat16, gradients sent in float32"
    shown = format_record(replace(built, dtypes=(sent,), rates=((1, 2e-4), (30, 0.0))))
    assert shown[1] == f"dtypes    {sent}"
    assert shown[4] == "lr        2.00e-04 in step 1, 0.00e+00 in step 30"
    everywhere = format_record(replace(built, all_logits="XForCausalLM is not a tested class"))
    assert everywhere[3] == "logits    of all places: XForCausalLM is not a tested class"
    padded = format_record(replace(built, padded=True))
    assert padded[4].startswith("tokens/s  over all ranks, padding included, in recent steps, ")


STEPPED = Stepped(7, 150, 5.43219, 1.5e-3, 0.98765, 6_512.4, 640_000_000, 92.2)


def test_a_step_is_one_line_with_everything() -> None:
    assert format_record(STEPPED) == [
        (
            "step   7/150  loss  5.4322  lr 1.50e-03  grad norm  0.988    6,512 tokens/s  "
            "memory 610.4 MiB  ETA 1:32"
        )
    ]


@pytest.mark.parametrize(
    ("norm", "shown"), [(0.5, "grad norm  0.500"), (math.inf, "skipped: overflow")]
)
def test_a_scaled_step_shows_its_scale_and_whether_it_overflowed(norm: float, shown: str) -> None:
    [line] = format_record(replace(STEPPED, grad_norm=norm, loss_scale=65536.0))
    assert f"{shown}  loss scale 65,536  " in line


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "step   7/150  loss  5.4322    6,512 tokens/s  memory 610.4 MiB  ETA 1:32"),
        (60, "step   7/150  loss  5.4322    6,512 tokens/s  ETA 1:32"),
        (30, "step   7/150  ETA 1:32"),
        (9, "step   7/150  ETA 1:32"),
    ],
)
def test_on_a_narrow_terminal_the_time_that_is_left_goes_last(width: int, line: str) -> None:
    assert format_step(STEPPED, width) == line


def test_lines_of_steps_are_equally_long() -> None:
    few = format_record(Stepped(1, 1000, 10.5, 1e-3, 12.5, 65.4, 640 * 2**20, 92.2))
    many = format_record(Stepped(1000, 1000, 5.4, 1e-3, 0.9, 65_000.4, 640 * 2**20, 92.2))
    assert [*map(len, few)] == [*map(len, many)]


def test_validation_stands_beside_the_baseline_it_should_beat() -> None:
    assert format_record(Evaluated(150, 4.25, 0.256, 6.2, 16_384, 1.0)) == [
        (
            "step 150  validation loss 4.2500  unigram baseline 6.20  perplexity 70.11  "
            "accuracy 25.6%"
        )
    ]


def test_a_perplexity_that_overflows_is_called_infinite() -> None:
    assert "perplexity inf" in format_record(Evaluated(1, 1e4, 0.0, 6.2, 9, 1.0))[0]


def test_bytes_are_a_table_with_a_column_for_each_rank() -> None:
    placed = Placed((Bytes("parameters", (512, 500), 1_000), Bytes("buffers", (8, 8), 8)))
    assert format_record(placed) == [
        "",
        "bytes       rank 0  rank 1  one process   share",
        "─" * 47,
        "parameters     512     500        1,000   51.2%",
        "buffers          8       8            8  100.0%",
        "all            520     508        1,008   51.6%",
    ]


def test_many_ranks_are_shown_by_their_extremes() -> None:
    table = format_record(Placed((Bytes("parameters", (10, 11, 12, 13, 14), 60),)))
    assert table[1].split() == ["bytes", "least", "most", "one", "process", "share"]
    assert table[3].split() == ["parameters", "10", "14", "60", "23.3%"]


def test_nothing_at_all_has_a_share_too() -> None:
    assert format_record(Placed((Bytes("buffers", (0,), 0),)))[3].split()[-1] == "100.0%"


def test_a_sample_is_indented_as_a_whole() -> None:
    assert format_record(Sampled("def f():", "\n  pass")) == [
        "",
        "sample    def f():\n            pass",
    ]


def test_a_question_and_its_answer_stand_apart() -> None:
    assert format_record(Sampled("what is 2+3?", "5", continues=False)) == [
        "",
        "prompt    what is 2+3?",
        "answer    5",
    ]


def test_at_the_first_steps_no_end_is_estimated() -> None:
    assert format_step(replace(STEPPED, seconds_left=None)).endswith("memory 610.4 MiB")


def test_the_end_says_where_everything_is() -> None:
    assert format_record(Finished("runs/demo", ("a", "b"), 65.0, 128)) == [
        "",
        "done      saved in runs/demo after 1:05: a, b",
    ]


def test_a_checkpoint_says_its_place_size_and_time_and_what_went() -> None:
    saved = Saved(100, "runs/demo/checkpoints/step-100", 41_800_000, 0.44, ("step-50", "step-25"))
    assert format_record(saved) == [
        "saved runs/demo/checkpoints/step-100 (39.9 MiB, 0.4 s); step-50, step-25 removed"
    ]
    assert format_record(Saved(1, "a/step-1", 4_180, 0.0, ())) == [
        "saved a/step-1 (4.1 KiB, 0.0 s)"
    ]


def test_where_a_run_goes_on_is_said_in_steps_and_samples() -> None:
    assert format_record(Resumed(3_200, 51_200, "runs/demo/checkpoints/step-3200", 4)) == [
        "resumed at step 3,200, sample 51,200, from runs/demo/checkpoints/step-3200"
    ]


def test_a_stop_says_whether_anything_is_lost() -> None:
    assert format_record(Stopped(80, 128, saved=True)) == [
        "stopped at step 80/128, checkpoint saved; rerun the same command to resume"
    ]
    assert format_record(Stopped(80, 128, saved=False)) == [
        (
            "stopped at step 80/128, NOT SAVED: rerun the same command to resume from the last "
            "checkpoint"
        )
    ]


def test_a_run_with_nothing_left_to_do_says_how_to_have_more() -> None:
    assert format_record(Complete("runs/demo", 128)) == [
        (
            "done      runs/demo is already complete (128 steps): raise run.steps or run.epochs "
            "to train longer, or start over with --run.overwrite true (deletes this run)"
        )
    ]


@pytest.mark.parametrize(
    ("steps", "had"), [(128, "finished at step 128"), (None, "did not finish")]
)
def test_a_run_that_is_replaced_is_named(steps: int | None, had: str) -> None:
    assert format_record(Replaced("runs/demo", steps)) == [
        (
            f"replaces  the run in runs/demo that {had}, since run.overwrite is true, and deletes "
            "it at the first save. To train that one longer: --run.overwrite false, and more "
            "--run.steps"
        )
    ]


def test_what_takes_long_is_said() -> None:
    assert format_record(Busy("reading text", 2.0)) == ["busy      reading text, 2 s so far"]


def test_every_record_has_lines() -> None:
    assert set(get_args(Record)) == set(_FORMATTERS)


def test_a_warning_is_a_line() -> None:
    assert format_record(Warned("careful")) == ["warning   careful"]


def test_a_clock_has_hours_when_needed() -> None:
    assert [clock(s) for s in (0, 59.6, 3_599, 3_725)] == ["0:00", "1:00", "59:59", "1:02:05"]


def test_a_plan_and_what_was_measured_are_one_line() -> None:
    compared = Compared(2**30, 3 * 2**29, 1000.0, 1100.0, 0.4, 0.44, ("time by forward",), "", 61)
    assert format_record(compared) == [
        (
            "plan      memory 1.0 GiB planned, 1.5 GiB measured (+50%); "
            "tokens/s 1,000 planned, 1,100 measured (+10%); "
            "MFU 40.0% planned, 44.0% measured (+10%)"
        ),
        "off       time by forward",
        "events    the engine's bytes were as planned at each of 61 events",
    ]
    unknown = Compared(2**30, None, None, 1100.0, None, None, (), None, 61)
    (line,) = format_record(unknown)
    assert line == (
        "plan      memory 1.0 GiB planned; tokens/s 1,100 measured, no plan without "
        "--machines; MFU not known without --machines"
    )
