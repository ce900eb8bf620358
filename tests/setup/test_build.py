"""What is said while a model is cut."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.setup import build
from tests.ranks import run_threads


@pytest.mark.parametrize(
    ("strategy", "world"), [("no_shard", 2), ("no_shard", 1), ("full_shard", 2), ("full_shard", 1)]
)
def test_copies_of_a_large_model_are_warned_of_where_there_are_any(
    strategy: str,
    world: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(comm: Comm) -> None:
        sw.shard(nn.Linear(4, 4), strategy, comm=comm)

    monkeypatch.setattr(build, "LARGE", 20)
    with caplog.at_level(logging.WARNING, "shardwise"):
        run_threads(world, rank)
    assert ("no_shard holds all" in caplog.text) is (strategy == "no_shard" and world > 1)
