"""Kind ``"full"``: the same files as ever, and rank 0 alone touches the disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import gathered, segments, writer
from shardwise.checkpoint.manifest import Manifest
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, saved, steps, tensors
from tests.copies import on_ranks, said
from tests.nets import NETS, Net
from tests.steps import STRATEGIES

DECODER = NETS[0]


@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_files_are_those_that_all_ranks_write(net: Net, tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        saved(net, 3, tmp_path / kind, kind=kind)
    names = {path.name for path in (tmp_path / "full").iterdir()}
    assert names == {path.name for path in (tmp_path / "sharded").iterdir()}
    for name in names - {"manifest.json", "ranks.safetensors"}:  # these differ by save
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "sharded" / name).read_bytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_every_strategy_and_split_into_files(strategy: str, tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        saved(DECODER, 2, tmp_path / kind, strategy, kind=kind, max_file_size=5000)
    assert len(list((tmp_path / "full").glob("model-*.safetensors"))) > 3
    full, sharded = tensors(tmp_path / "full", "model"), tensors(tmp_path / "sharded", "model")
    assert full.keys() == sharded.keys()
    assert all(torch.equal(full[name], sharded[name]) for name in full)


def test_only_rank_0_opens_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    enter = writer.Writer.__enter__

    def watched(self: writer.Writer) -> writer.Writer:
        ranks.append(self.rank)
        return enter(self)

    monkeypatch.setattr(writer.Writer, "__enter__", watched)
    saved(DECODER, 3, tmp_path / "step-2", kind="full")
    assert ranks == [0]


def test_little_is_on_its_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    rounds, exchange = segments.rounds, segments.exchange_edges

    def small(moves: Any, world: int) -> Any:
        return rounds(moves, world, 2000)

    def watched(comm: Comm, files: Any) -> None:
        exchange(comm, files)
        most.append(sum(move.stop - move.start for file in files for move in file.plan.moves))

    monkeypatch.setattr(gathered, "rounds", small)
    monkeypatch.setattr(gathered, "exchange_edges", watched)
    saved(DECODER, 2, tmp_path / "step-2", kind="full")
    assert len(most) > 6
    assert sum(most) > 2 * 3 * 4 * 2000


def test_the_manifest_says_who_wrote_it(tmp_path: Path) -> None:
    for kind in ("sharded", "full", "local"):
        saved(DECODER, 2, tmp_path / kind, kind=kind)
    lines = [
        Manifest.decode((tmp_path / kind / "manifest.json").read_bytes(), kind).line
        for kind in ("sharded", "full", "local")
    ]
    assert lines == [
        "sharded safetensors, written by 2 ranks; any number of ranks loads it",
        "full safetensors, written by one of 2 ranks; any number of ranks loads it",
        "local shards of 2 ranks; only 2 ranks with full_shard and the same units can load it",
    ]


def test_a_manifest_from_before_there_were_kinds_is_sharded(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    fields = json.loads((tmp_path / "step-2" / "manifest.json").read_text())
    del fields["kind"], fields["digest"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    again = Manifest.decode(json.dumps({**fields, "digest": digest}).encode(), "manifest.json")
    assert again.kind == "sharded"


def test_a_disk_that_refuses_is_said_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_at", fails)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        text = said(sw.CheckpointError, lambda: sharded.save(tmp_path / "a", kind="full"))
        steps(model, adamw(model.parameters()), DECODER, comm.rank, range(1))  # it goes on
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert all("the disk is full" in text for text in texts)
    assert list(tmp_path.iterdir()) == []


def test_not_in_the_background(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return said(sw.ConfigError, lambda: sharded.save_async(tmp_path / "a", kind="full"))

    assert "call save()" in on_ranks(2, DECODER.build, rank)[0]
