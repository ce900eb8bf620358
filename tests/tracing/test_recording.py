"""A step as it was done, beside the step as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.ranks import run_threads


class Skips(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.all else self.layers[:1]:
            x = layer(x)
        return x


def rows_of(comm: Comm, folder: Path, runs_all: bool, **how: Any) -> list[dict[str, object]]:
    model = Skips()
    sharded = sw.shard(model, wrap=sw.wrap.by_class(nn.Linear), comm=comm, **how)
    with sw.record(sharded) as recording:
        model.all = runs_all
        model(torch.ones(2, 8)).sum().backward()
    assert not sharded.runtime.listeners
    path = folder / f"{comm.rank}.json"
    recording.save(path)
    rows: list[dict[str, object]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return rows


def test_planned_and_done_are_two_lanes_with_the_same_events(tmp_path: Path) -> None:
    for rows in run_threads(2, lambda comm: rows_of(comm, tmp_path, runs_all=True)):
        lanes = [[row for row in rows if row["pid"] == pid] for pid in (1, 2)]
        names = [[(row["ph"], row["name"]) for row in lane[1:]] for lane in lanes]
        assert names[0] == names[1]
        assert lanes[0][0]["args"] == {"name": "planned: full_shard"}
        assert ("i", "end") in names[0]
        begun, ended = (
            [(row["cat"], row["id"], row["pid"]) for row in rows if row["ph"] == ph] for ph in "be"
        )
        assert sorted(begun) == sorted(ended)
        assert len({(category, each) for category, each, _ in begun}) == len(begun) == 10


def test_an_update_of_copies_is_an_instant_in_both_lanes(tmp_path: Path) -> None:
    def rank(comm: Comm) -> list[dict[str, object]]:
        return rows_of(comm, tmp_path, runs_all=True, strategy="hybrid_full", mesh=(2, 2))

    for rows in run_threads(4, rank):
        for lane in (1, 2):
            updates = [row for row in rows if row["pid"] == lane and "update" in str(row["name"])]
            assert [(row["ph"], row["name"]) for row in updates] == [
                ("i", "update layers.0"),
                ("i", "update layers.1"),
            ]


def test_what_was_planned_and_not_done_says_so(tmp_path: Path) -> None:
    (rows,) = run_threads(1, lambda comm: rows_of(comm, tmp_path, runs_all=False))
    missed = {row["name"] for row in rows if "(not done)" in str(row["args"])}
    assert "layers.1" in missed
    assert all(row["pid"] == 1 for row in rows if "(not done)" in str(row["args"]))


def test_a_recording_reads_as_a_line_for_each_event() -> None:
    model = Skips()
    sharded = sw.shard(model, wrap=sw.wrap.by_class(nn.Linear))
    with sw.record(sharded) as recording:
        model(torch.ones(2, 8)).sum().backward()
    title, *lines = repr(recording).splitlines()
    assert title == "# rank 0 of 1, one step of full_shard"
    assert [line.split()[2:] for line in lines] == [
        [str(event.op), *([event.unit] if event.unit else [])] for event in recording.events
    ]
