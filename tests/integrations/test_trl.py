"""TRL's trainers with our engine, each by its own name and with one import."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.integrations import trl_runs as jobs
from tests.integrations.started import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.prove]  # TRL takes seconds to import

Logs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    folder = tmp_path_factory.mktemp("trl")
    started = [(1, "sft-plain"), (1, "dpo-plain"), *((2, job) for job in jobs.JOBS)]
    # Interpreters of their own: ``datasets`` waits for ever in one that was forked.
    inspect.unwrap(on_ranks)(jobs.__name__, "", started, folder)
    return {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


@pytest.mark.parametrize("job", ["sft", "dpo"])
def test_two_ranks_train_as_one_process_of_trl_does(logs: Logs, job: str) -> None:
    for name in ("loss", "grad_norm"):
        plain = [line[name] for line in logs[f"{job}-plain"]]
        assert [line[name] for line in logs[job]] == pytest.approx(plain, rel=1e-4)


def test_grpo_generates_and_trains(logs: Logs) -> None:
    """What it trains on it has sampled, so there is no plain run to be equal to."""
    assert len(logs["grpo"]) == 3
    assert all(line["grad_norm"] > 0 for line in logs["grpo"])
    assert all(line["completions/max_length"] <= 6 for line in logs["grpo"])
