"""A model's loss with logits of some places: the numbers of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.train.batches import IGNORED
from shardwise.train.job import Job, build
from shardwise.train.language_model import ROWS, summed, summed_loss
from shardwise.train.packed import Examples, SampleRows
from shardwise.train.validation import Validation
from tests.copies import assert_near, local
from tests.ranks import run_sharing, run_threads
from tests.train.tiny import tiny_recipe

VOCABULARY = 40


def samples() -> SampleRows:
    """Samples of 13 tokens; the last ones are trained on, and of every fourth sample none."""
    trained = [np.arange(13) >= 13 - (number % 4) * 4 for number in range(40)]
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 40 * 13).astype(np.int32)
    return SampleRows(Examples(ids, np.concatenate(trained), np.full(40, 13)), context=16)


def job_of(folder: Path, comm: Comm, *overrides: str) -> Job:
    return build(tiny_recipe(folder, *overrides), comm, samples(), VOCABULARY)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(("world", "run"), [(1, run_threads), (2, run_sharing), (3, run_threads)])
def test_loss_and_gradients_are_those_of_all_logits(
    tmp_path: Path, strategy: str, world: int, run: Any
) -> None:
    """Micro-batches of one row: some have no label at all."""

    def rank(comm: Comm) -> list[Any]:
        results = []
        for logits in ("labelled", "all"):
            job = job_of(tmp_path, comm, f"sharding.strategy={strategy}", f"batch.logits={logits}")
            loss, norm = job.forward_backward(0), job.sharded.clip_grad_norm_(1e9)
            gradients = [local(param.grad) for param in job.model.parameters()]
            results.append([loss, local(norm), *gradients])
        return results

    for labelled, whole in run(world, rank):
        assert_near(labelled, whole)


def test_a_micro_batch_without_labels_has_a_loss_of_zero_and_gradients(tmp_path: Path) -> None:
    job = job_of(tmp_path, LocalComm())
    batch = samples().take(np.array([0]))
    batch.targets.fill_(IGNORED)
    loss = summed_loss(job.model, batch, job.head)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in job.model.parameters())


@pytest.mark.parametrize("rows", [ROWS, 3])
def test_validation_is_that_of_all_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("shardwise.train.language_model.ROWS", rows)
    job = job_of(tmp_path, LocalComm())
    labelled, whole = (
        Validation(samples(), 9, 2, head).evaluate(job.model, LocalComm(), 0)
        for head in (job.head, None)
    )
    assert labelled.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (labelled.accuracy, labelled.tokens) == (whole.accuracy, whole.tokens)


def test_a_measure_sees_the_places_with_a_target_alone(tmp_path: Path) -> None:
    job, batch = job_of(tmp_path, LocalComm()), samples().take(np.arange(4))
    shapes = list[tuple[int, ...]]()

    def measure(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shapes.append((*logits.shape, len(targets)))
        return logits.sum()

    with torch.no_grad():
        summed(job.model, batch, measure, job.head)
    count = int((batch.targets != IGNORED).sum())
    assert shapes == [(count, VOCABULARY, count)]
    assert count < batch.targets.numel() / 2


def test_a_recipe_may_ask_for_all_logits_and_a_compiled_model_has_them(tmp_path: Path) -> None:
    assert job_of(tmp_path, LocalComm()).all_logits == ""
    job = job_of(tmp_path, LocalComm(), "batch.logits=all")
    assert (job.head, job.all_logits) == (None, "batch.logits is all")
    compiled = job_of(tmp_path, LocalComm(), "sharding.compile=eager")
    assert compiled.all_logits == "it is compiled"
