"""Programs for transformers and TRL in which one import line was changed, under torchrun.

With the line changed back, one process does the same: the losses are equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from shardwise.integrations import transformers as _ours  # noqa: F401 - once, not in each rank
from tests.examples.run import EXAMPLES, run, torchrun
from tests.forked import forked
from tests.hf.folders import tiny
from tests.train.tiny import documents

pytestmark = [pytest.mark.spawn, pytest.mark.prove]

STEPS = ("--max_steps", 3, "--gradient_accumulation_steps", 2, "--learning_rate", 0.01)
COMMON = (*STEPS, "--logging_steps", 1, "--report_to", "none", "--use_cpu")


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("\n".join(documents()), "utf-8")
    return path


def chats(folder: Path) -> Path:
    def row(number: int) -> str:
        turns = ("user", f"what is {number}"), ("assistant", f"it is {number * number}")
        return json.dumps(
            {"messages": [{"role": role, "content": content} for role, content in turns]}
        )

    path = folder / "chats.jsonl"
    path.write_text("\n".join(map(row, range(24))), "utf-8")
    return path


def losses(folder: Path) -> list[float]:
    (state,) = folder.glob("**/trainer_state.json")
    return [line["loss"] for line in json.loads(state.read_text())["log_history"] if "loss" in line]


def with_their_line(program: Path, folder: Path) -> Path:
    """The program as it is for plain transformers, or TRL: the comment says how."""
    (ours,) = (line for line in program.read_text().splitlines() if "  # was: " in line)
    theirs = folder / program.name
    theirs.write_text(program.read_text().replace(ours, ours.partition("  # was: ")[2]))
    return theirs


def compared(program: str, folder: Path, *options: object) -> Path:
    """Run it on two ranks, and on one process with their line; the folder that ours wrote."""
    sharded, plain = folder / "sharded", folder / "plain"
    arguments = ("--model_name_or_path", tiny("llama", folder / "llama"), *options, *COMMON)
    batch = "--per_device_train_batch_size"
    torchrun(EXAMPLES / program, *arguments, "--output_dir", sharded, batch, 2, folder=folder)
    theirs = with_their_line(EXAMPLES / program, folder)
    run(theirs, *arguments, "--output_dir", plain, batch, 4, folder=folder)
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-4)
    assert len(losses(sharded)) == 3
    return sharded


@forked
def test_a_script_for_transformers_trains_alike_with_one_other_line(tmp_path: Path) -> None:
    options = (
        "--train_file",
        text(tmp_path),
        "--do_train",
        "--do_eval",
        "--save_strategy",
        "no",
        "--train_sampling_strategy",
        "sequential",
    )
    saved = compared("hf_trainer.py", tmp_path, *options)
    assert json.loads((saved / "eval_results.json").read_text())["perplexity"] < 320
    AutoModelForCausalLM.from_pretrained(saved)


@forked
def test_a_script_for_trl_trains_alike_with_one_other_line(tmp_path: Path) -> None:
    lora = (
        "--use_peft",
        "--lora_r",
        4,
        "--lora_dropout",
        0,
        "--lora_target_modules",
        "q_proj",
        "v_proj",
    )
    saving = "--save_strategy", "steps", "--save_steps", 3
    options = (*saving, "--dataset_name", chats(tmp_path), "--bf16", False, "--max_length", 64)
    saved = compared("trl_sft.py", tmp_path, *options, *lora)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    PeftModel.from_pretrained(plain, str(saved))


@forked
def test_the_llama_3_articles_program_trains_with_one_other_line(tmp_path: Path) -> None:
    program = Path(__file__).with_name("llama3_article.py")
    folder = tiny("llama", tmp_path / "llama"), text(tmp_path), tmp_path / "results"
    printed, _ = torchrun(program, *folder, folder=tmp_path)
    losses = json.loads(printed[-1])
    assert losses[-1] < losses[0] - 0.05
    saved = {path.name for path in (tmp_path / "results").iterdir()}
    assert saved == {"checkpoint-4", "checkpoint-6"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    PeftModel.from_pretrained(plain, str(tmp_path / "results" / "checkpoint-6"))
