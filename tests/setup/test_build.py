"""What is said while a model is cut."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.setup import build
from shardwise.tracing.blueprint import draw
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


@pytest.mark.parametrize(("numel", "warns"), [(10**9 - 1, False), (10**9, True)])
def test_a_model_is_large_from_a_billion_parameters(
    numel: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    blueprint = draw(nn.Linear(numel, 1, bias=False, device="meta"), "no_shard")
    with caplog.at_level(logging.WARNING, "shardwise"):
        build.warn_of_copies(blueprint.specs, blueprint.world)
    said = "no_shard holds all 1.0 billion parameters, their gradients and optimizer state on every"
    assert (said in caplog.text) is warns
