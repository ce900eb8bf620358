"""The program that pre-trains a language model, rehearsed on two CPU ranks, and resumed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from shardwise.recipe.read import read_recipe
from shardwise.train.decoder import Decoder
from tests.examples.run import EXAMPLES, lines_of, run, torchrun
from tests.forked import forked
from tests.test_surface import Source, calls_of_one_vendor

PROGRAM = EXAMPLES / "pretrain_150m.py"
RECIPE = EXAMPLES.parent / "recipes" / "pretrain-150m-c4.yaml"


def losses(lines: list[str]) -> dict[int, float]:
    matches = (re.match(r"step: (\d+)  loss (\S+)  grad norm", line) for line in lines)
    return {int(match[1]): float(match[2]) for match in matches if match}


@pytest.mark.spawn
@pytest.mark.prove
@forked
def test_a_rehearsal_says_what_it_shrinks_and_is_resumed_at_its_sample(tmp_path: Path) -> None:
    import datasets  # noqa: F401 - once here, and not in each rank that is forked
    from transformers import LlamaForCausalLM

    whole, other = torchrun(PROGRAM, "--rehearse", "--folder", "whole", folder=tmp_path)
    assert whole[0] == "rehearsal: the same path, with these keys of the recipe changed"
    assert "  model.width              896 -> 64" in whole
    assert "  data.source              hf://datasets/allenai/c4/en -> stdlib" in whole
    assert "model: 133,440 parameters, full_shard, 2 ranks" in whole
    assert "rank 0 reads streams 0 to 1" in whole
    assert other == ["rank 1 reads streams 2 to 3"]
    assert "global batch 32 = micro-batch 4 x 4 accumulation steps x 2 ranks" in whole
    assert whole[-1] == "All done"
    assert sorted(losses(whole)) == list(range(1, 11))
    assert losses(whole)[10] < losses(whole)[1] - 0.2

    model = LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "step-10")
    assert model.num_parameters() == 133_440
    shutil.rmtree(tmp_path / "whole" / "step-10")
    options = ("--folder", "whole", "--strategy", "shard_grad_op")
    again, _ = torchrun(PROGRAM, "--rehearse", *options, folder=tmp_path)
    assert "resumed at sample 160" in again
    assert losses(again) == {step: losses(whole)[step] for step in range(6, 11)}
    assert "model: 133,440 parameters, shard_grad_op, 2 ranks" in again


@pytest.mark.spawn
@pytest.mark.prove
def test_python_starts_two_ranks_for_a_rehearsal(tmp_path: Path) -> None:
    options = ("--steps", 2, "--strategy", "hybrid_shard")  # on one host: one copy
    lines = run(PROGRAM, "--rehearse", *options, folder=tmp_path)
    assert "model: 133,440 parameters, hybrid_shard, 2 ranks" in "".join(
        lines
    )  # rank 1 prints, too
    assert f"saved {tmp_path}/runs/pretrain-150m-rehearsal/step-2" in lines
    assert lines[-1] == "All done"


def test_the_recipe_has_the_documents_numbers_and_150_million_parameters() -> None:
    recipe = read_recipe(RECIPE)
    with torch.device("meta"):
        model = Decoder(recipe.model, recipe.tokenizer.vocabulary, recipe.data.context)
    assert 149e6 < sum(param.numel() for param in model.parameters()) < 151e6
    batch = recipe.batch
    assert (batch.rows, batch.micro, recipe.data.context, recipe.optimizer.lr) == (
        128,
        8,
        1024,
        1e-3,
    )
    assert recipe.data.source == "hf://datasets/allenai/c4/en"


def test_the_program_names_no_device() -> None:
    assert calls_of_one_vendor(Source("pretrain_150m", PROGRAM.read_text("utf-8"))) == []


def test_the_page_has_a_command_for_each_of_the_five_steps() -> None:
    page = lines_of("pretraining.md")
    commands = re.findall(r"^ +\$ (.*pretrain_150m\.py.*)$", page, re.MULTILINE)
    assert len(commands) == 5
