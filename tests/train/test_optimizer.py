"""The recipe's optimizer: which parameters decay, and AdamW in 32 and in 8 bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.optim.average import EMA
from shardwise.train.job import Job, build
from shardwise.train.optimizer import optimizer_of, parameter_groups
from tests.hf.quantising import updating_alone
from tests.train.test_job import VOCABULARY, rows
from tests.train.tiny import tiny_recipe


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decays, stays = parameter_groups(model.parameters(), 0.1)
    assert decays == {"params": [model[0].weight], "weight_decay": 0.1}
    assert stays["weight_decay"] == 0.0
    assert len(stays["params"]) == 3


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    (group,) = parameter_groups(model.parameters(), 0.1)
    assert group["params"] == [model.weight]


def step(job: Job, number: int) -> float:
    rank_loss = float(job.forward_backward(number))
    job.clip_and_set_lr(number)
    job.update()
    job.optimizer.zero_grad()
    return rank_loss


def test_a_checkpoint_with_the_state_of_torchs_adamw_is_resumed(tmp_path: Path) -> None:
    """As runs of earlier versions wrote them; the moving average goes along."""
    recipe = tiny_recipe(tmp_path, "optimizer.ema=0.9")

    def as_before(job: Job) -> Job:
        groups = parameter_groups(job.model.parameters(), recipe.optimizer.weight_decay)
        config = recipe.optimizer
        optimizer = torch.optim.AdamW(groups, config.lr, config.betas, config.eps)
        return replace(job, optimizer=optimizer, ema=EMA(optimizer, 0.9))

    def rank(comm: Comm) -> tuple[list[float], list[float]]:
        jobs = [build(recipe, comm, rows(), VOCABULARY) for _ in range(2)]
        earlier, resumed = as_before(jobs[0]), jobs[1]
        for number in range(2):
            step(earlier, number)
        earlier.sharded.save(tmp_path / "half", earlier.optimizer)
        resumed.sharded.load(tmp_path / "half", resumed.optimizer)
        return [step(earlier, n) for n in (2, 3)], [step(resumed, n) for n in (2, 3)]

    for losses, again in threads.run(2, rank):
        assert again == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_moments_of_8_bits_are_kept_saved_and_resumed_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    """On CPU nothing is paged. The first run takes four steps, the second resumes after two."""
    pytest.importorskip("bitsandbytes")
    recipe = tiny_recipe(tmp_path, f"optimizer.name={name}", "model.width=64", "model.hidden=96")

    def rank(comm: Comm, first: int) -> tuple[list[float], set[torch.dtype]]:
        job = build(recipe, comm, rows(), VOCABULARY)
        updating_alone(job.optimizer)
        if first:
            job.sharded.load(tmp_path / "half", job.optimizer)
        losses = []
        for number in range(first, 4):
            losses.append(step(job, number))
            if number == 1:
                job.sharded.save(tmp_path / "half", job.optimizer)
        states = job.optimizer.state.values()
        return losses, {state["state1"].dtype for state in states if state}

    whole, resumed = (threads.run(2, lambda comm: rank(comm, first)) for first in (0, 2))  # noqa: B023
    for (losses, dtypes), (again, _) in zip(whole, resumed, strict=True):
        assert losses[2:] == again
        assert torch.uint8 in dtypes


def test_without_bitsandbytes_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = tiny_recipe(tmp_path, "optimizer.name=adamw_8bit").optimizer
    with pytest.raises(ConfigError, match=r"pip install shardwise\[bnb\]"):
        optimizer_of(sw.shard(nn.Linear(2, 2)), config)
